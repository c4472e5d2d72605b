"""Several runs by ``--multirun``: one directory, of which every job is a run directory, that can be gone on with.

:class:`Sweep` is a callback of Hydra, so it works under any launcher and sweeper: it chooses the directory before the
jobs start and counts them when they have ended. :func:`run_job` is what a job does in place of a single run.

====================  ==================================================================================
sweep.json            command, jobs, and the hash of all their configurations
<number>-<name>/      run directory of a job; summary.json says how it ended, traceback.txt why it failed
====================  ==================================================================================
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from .cli import explain, refuse
from .config import ConfigError, known_keys, plain

COMPLETED = "completed"


class Sweep(Callback):
    """Chooses the directory of a sweep and holds it against other processes; at the end says what failed."""

    lock: IO[str] | None = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Go on in the latest sweep of the same jobs that no other process runs, or start a new directory."""
        command = [item for item in plain(config.hydra.overrides.task) if not item.startswith("sweep.")]
        record = _record(config, command)
        wanted = Path(config.hydra.sweep.dir)
        directory = (config.sweep.resume and self._latest(wanted, record)) or self._fresh(wanted)
        if not (directory / "sweep.json").is_file():
            _write(directory / "sweep.json", record)
        with read_write(config), open_dict(config):
            config.hydra.sweep.dir = str(directory)
            # The jobs are composed from the overrides, which name the directory too.
            config.hydra.overrides.hydra.append(f"hydra.sweep.dir='{directory}'")

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Raises SystemExit(1) after a table of the jobs that did not end well."""
        directory = Path(config.hydra.sweep.dir)
        ended = {path.name: _exit_reason(path) for path in _job_directories(directory)}
        failed = {name: reason for name, reason in ended.items() if reason != COMPLETED}
        print(f"sweep  {len(ended) - len(failed)} of {len(ended)} jobs completed  {directory}", flush=True)
        if failed:
            for name, reason in failed.items():
                print(f"  {name}  {reason}")
            print("the same command goes on with what is missing", flush=True)
            raise SystemExit(1)

    def _latest(self, wanted: Path, record: dict[str, Any]) -> Path | None:
        """The latest directory beside ``wanted``, or that itself, whose sweep.json is of the same jobs."""
        for path in sorted({*wanted.parent.parent.glob("*/*/sweep.json"), *wanted.glob("sweep.json")}, reverse=True):
            if _read(path).get("identity") == record["identity"] and self._hold(path.parent):
                done = sum(_exit_reason(job) == COMPLETED for job in _job_directories(path.parent))
                print(f"sweep  goes on in {path.parent}: {done} of {record['jobs'] or 'its'} jobs completed")
                return path.parent
        return None

    def _fresh(self, wanted: Path) -> Path:
        """``wanted``, or with -2, -3 ... where that holds a sweep or another process has just taken it."""
        for attempt in range(1, 1000):
            directory = wanted if attempt == 1 else wanted.with_name(f"{wanted.name}-{attempt}")
            directory.mkdir(parents=True, exist_ok=True)
            if self._hold(directory) and not (directory / "sweep.json").exists():
                return directory
        refuse(f"hydra.sweep.dir={wanted}: 1000 sweeps there already")

    def _hold(self, directory: Path) -> bool:
        """Whether the directory is ours until this process ends."""
        lock = (directory / ".lock").open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return False
        self.lock = lock
        return True


def _record(config: DictConfig, command: Sequence[str]) -> dict[str, Any]:
    """What sweep.json says. Every job is composed here, so that a mistake in one is refused before any has run."""
    try:
        jobs = _jobs(config, command)
        identity = _identity(jobs, command)
    except (HydraException, OmegaConfBaseException) as error:
        refuse(explain(error, known_keys()))  # an exception would be a warning to Hydra
    return {"command": list(command), "jobs": len(jobs) or None, "identity": identity}


def _jobs(config: DictConfig, command: Sequence[str]) -> list[list[str]]:
    """The overrides of each job, of Hydra's own sweeper; any other chooses them as it goes: []."""
    sweeper = config.hydra.sweeper
    if not sweeper._target_.endswith("BasicSweeper"):
        return []
    params = [f"{key}={value}" for key, value in (sweeper.params or {}).items()]
    parsed = OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides([*params, *command])
    return BasicSweeper.split_arguments(parsed, None)[0]


def _identity(jobs: Sequence[Sequence[str]], command: Sequence[str]) -> str:
    """Of all configurations, defaults included: a default that has changed makes it another sweep."""
    configs = list(_resolved(jobs)) or [json.dumps(list(command))]
    return hashlib.sha256("\n".join(configs).encode()).hexdigest()


def _resolved(jobs: Sequence[Sequence[str]]) -> Iterator[str]:
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    for overrides in jobs:
        master = hydra.compose_config("train", list(overrides), run_mode=RunMode.RUN, with_log_configuration=False)
        with open_dict(master):
            for key in ("hydra", "sweep"):
                master.pop(key)
        yield OmegaConf.to_yaml(master, resolve=True)


def is_job() -> bool:
    """Whether this process runs one of several jobs."""
    return not OmegaConf.is_missing(HydraConfig.get().job, "num")


def run_job(task: Callable[[DictConfig, Path], Any], cfg: DictConfig) -> Any:
    """One job: skipped where it has completed, gone on with where it has a checkpoint; its failure is not the sweep's.

    Returns:
        The task's value; of a completed job the recorded one; inf of one that failed, which no search takes for the
        smallest.

    Raises:
        SystemExit: 130, interrupted.
    """
    directory = Path(HydraConfig.get().runtime.output_dir)
    summary = _read(directory / "summary.json")
    if summary.get("exit_reason") == COMPLETED:
        print(f"{_progress(directory)}  completed before, skipped", flush=True)
        return summary["val/loss"]
    print(_progress(directory), flush=True)
    if cfg.ckpt_path is not None:
        refuse(f"ckpt_path={cfg.ckpt_path}: a job of a sweep starts from the model; go on with a run by itself")
    (directory / "traceback.txt").unlink(missing_ok=True)  # of a try before this one
    last = directory / "checkpoints" / "last.ckpt"
    if last.is_file():
        cfg.ckpt_path = str(last)
    if cfg.logger.group is None:
        cfg.logger.group = directory.parent.name
    try:
        return task(cfg, directory)
    except Exception as error:
        _record_failure(directory, error)
        return math.inf


def _record_failure(directory: Path, error: Exception) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "traceback.txt").write_text("".join(traceback.format_exception(error)))
    line = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
    _write(directory / "summary.json", {"exit_reason": f"failed: {line}"})
    print(f"failed: {line}\n  {directory / 'traceback.txt'}", flush=True)


def _progress(directory: Path) -> str:
    """``job 3/12  1-softmax...  4 min left``: by the mean of the jobs that have completed."""
    n_jobs = _read(directory.parent / "sweep.json").get("jobs")
    number = HydraConfig.get().job.num + 1
    others = [_read(path / "summary.json") for path in _job_directories(directory.parent)]
    seconds = [other["seconds"] for other in others if other.get("exit_reason") == COMPLETED]
    line = f"job {number}/{n_jobs}  {directory.name}" if n_jobs else f"job {number}  {directory.name}"
    if not (seconds and n_jobs):
        return line
    left = (n_jobs - len(seconds)) * sum(seconds) / len(seconds)
    return f"{line}  about {math.ceil(left / 60)} min left"


def _job_directories(directory: Path) -> list[Path]:
    """In order of their numbers."""
    found = [path for path in directory.glob("*-*") if path.is_dir() and path.name.split("-")[0].isdigit()]
    return sorted(found, key=lambda path: int(path.name.split("-")[0]))


def _exit_reason(job_directory: Path) -> str:
    return _read(job_directory / "summary.json").get("exit_reason", "killed")


def _write(path: Path, content: dict[str, Any]) -> None:
    from .rundir import write_json  # which imports torch: not for --help

    write_json(path, content)


def _read(path: Path) -> dict[str, Any]:
    """{} where there is no such file, or none that was written whole."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
