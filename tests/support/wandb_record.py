"""Reads the record that an offline W&B run leaves on disk, so that a test can check what was logged.

W&B gives no reader for its own `run-<id>.wandb` file short of uploading it. The file is a seven-byte header followed by
protobuf messages in the log format of LevelDB: blocks of 32 KiB, filled with chunks, each a checksum, a length, a type
and a payload; a message that does not fit its block continues in the next one. The checksum is a plain CRC-32 of type
and payload, not the masked CRC-32C of LevelDB itself. A killed run may leave the last message half written; the reader
yields the messages before it.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import wandb
from wandb.proto import wandb_internal_pb2

FILE_HEADER = struct.Struct("<4sHB")  # magic bytes, magic number, version
CHUNK_HEADER = struct.Struct("<IHB")  # checksum, payload length, chunk type
BLOCK_SIZE = 32 * 1024
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4  # chunk types


@dataclass(frozen=True)
class WandbRecord:
    """What one `.wandb` file says about its run; a resumed run has several such files."""

    path: Path
    project: str = ""
    run_id: str = ""
    name: str = ""
    tags: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, str | None] = field(default_factory=dict)  # metric name or glob -> its x axis
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None  # None: the run did not finish
    files: list[str] = field(default_factory=list)


def read_runs(wandb_dir: Path | str) -> list[WandbRecord]:
    """Reads every record below a `wandb` directory, oldest run directory first."""
    # Resolving the paths makes the `latest-run` symlink coincide with the directory that it points to.
    files = {file.resolve() for file in Path(wandb_dir).glob("*/run-*.wandb")}
    return [read_run(file) for file in sorted(files, key=_start_time)]


def finished_runs(wandb_dir: Path | str) -> list[WandbRecord]:
    """The records of runs that this process has finished.

    W&B's service writes the last messages some milliseconds after ``finish()`` has returned; it is stopped first.
    """
    wandb.teardown()
    return read_runs(wandb_dir)


def read_run(path: Path | str) -> WandbRecord:
    """Reads the record of one run directory, or one `.wandb` file."""
    file = _record_file(Path(path))
    fields: dict[str, Any] = {"config": {}, "history": [], "metrics": {}, "summary": {}, "files": []}
    fields["run_id"] = file.stem.removeprefix("run-")  # a run killed early leaves nothing but the file header
    for payload in _payloads(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(payload)
        kind = record.WhichOneof("record_type")
        if kind in _HANDLERS:
            _HANDLERS[kind](fields, getattr(record, kind))
    fields["config"].pop("_wandb", None)  # W&B's own bookkeeping, not the user's configuration
    return WandbRecord(path=file, **fields)


def _record_file(path: Path) -> Path:
    if path.is_file():
        return path
    files = list(path.glob("run-*.wandb"))
    if len(files) != 1:
        raise FileNotFoundError(f"{path} holds {len(files)} .wandb files instead of one")
    return files[0]


def _start_time(file: Path) -> tuple[str, str]:
    # Directories are named [offline-]run-<date>_<time>-<id>: the mode must not decide the order.
    return file.parent.name.removeprefix("offline-"), str(file)


def _payloads(data: bytes) -> Iterator[bytes]:
    """Joins chunks to whole messages; a message without its last chunk is dropped."""
    parts: list[bytes] = []
    for kind, part in _chunks(data):
        if kind in (FULL, FIRST):
            parts = []
        parts.append(part)
        if kind in (FULL, LAST):
            yield b"".join(parts)


def _chunks(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the type and payload of each chunk, up to the first incomplete one."""
    _check_file_header(data)
    position = FILE_HEADER.size
    while position + CHUNK_HEADER.size <= len(data):
        block_left = BLOCK_SIZE - position % BLOCK_SIZE
        if block_left < CHUNK_HEADER.size:  # too short for a header: padding
            position += block_left
            continue
        checksum, length, kind = CHUNK_HEADER.unpack_from(data, position)
        position += CHUNK_HEADER.size + length
        if position > len(data):
            return
        payload = data[position - length : position]
        _check_chunk(kind, payload, checksum)
        yield kind, payload


def _check_file_header(data: bytes) -> None:
    if len(data) >= FILE_HEADER.size and FILE_HEADER.unpack_from(data)[:2] != (b":W&B", 0xBEE1):
        raise ValueError("not a .wandb file: unknown header")


def _check_chunk(kind: int, payload: bytes, checksum: int) -> None:
    if kind not in (FULL, FIRST, MIDDLE, LAST) or zlib.crc32(bytes([kind]) + payload) != checksum:
        raise ValueError("damaged .wandb file: wrong type or checksum of a chunk")


def _add_run(fields: dict[str, Any], run: Any) -> None:
    fields.update(project=run.project, run_id=run.run_id, name=run.display_name, tags=tuple(run.tags))
    _update(fields["config"], run.config)


def _add_config(fields: dict[str, Any], config: Any) -> None:
    _update(fields["config"], config)


def _add_history(fields: dict[str, Any], history: Any) -> None:
    row: dict[str, Any] = {}
    for item in history.item:
        _put(row, _keys(item), json.loads(item.value_json))
    fields["history"].append(row)


def _add_summary(fields: dict[str, Any], summary: Any) -> None:
    _update(fields["summary"], summary)


def _add_metric(fields: dict[str, Any], metric: Any) -> None:
    fields["metrics"][metric.name or metric.glob_name] = metric.step_metric or None


def _add_exit(fields: dict[str, Any], run_exit: Any) -> None:
    fields["exit_code"] = run_exit.exit_code


def _add_files(fields: dict[str, Any], files: Any) -> None:
    fields["files"].extend(item.path for item in files.files)


_HANDLERS: dict[str, Callable[[dict[str, Any], Any], None]] = {
    "run": _add_run,
    "config": _add_config,
    "history": _add_history,
    "summary": _add_summary,
    "metric": _add_metric,
    "exit": _add_exit,
    "files": _add_files,
}


def _update(target: dict[str, Any], changes: Any) -> None:
    """Applies the updates and removals of a config or summary message."""
    for item in changes.update:
        _put(target, _keys(item), json.loads(item.value_json))
    for item in changes.remove:
        _remove(target, _keys(item))


def _keys(item: Any) -> Sequence[str]:
    return list(item.nested_key) or [item.key]


def _put(target: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    for key in keys[:-1]:
        if not isinstance(target.get(key), dict):
            target[key] = {}
        target = target[key]
    target[keys[-1]] = value


def _remove(target: dict[str, Any], keys: Iterable[str]) -> None:
    *parents, last = keys
    for key in parents:
        target = target.get(key, {})
    target.pop(last, None)
