"""Text to blocks of token ids: read, split contiguously, tokenise, pack, cache, serve.

A block holds context_length + 1 tokens and shares its last one with the next block, so that every token but the first
of a split is predicted exactly once and no row is padded. Training and validation text are cut apart before
tokenisation: no token and no block reaches across.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from lightning import LightningDataModule
from omegaconf import DictConfig
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .config import ConfigError

FORMAT = 1  # of the cache: raise it when blocks are built differently
SUMMARY = "summary.json"


# ---------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Text:
    """What a run trains on and what it is judged on."""

    train: str
    validation: str

    def fingerprint(self) -> dict[str, Any]:
        """Hashes and lengths, to tell in a run's record which text it was."""
        parts = {"train": self.train, "validation": self.validation}
        hashes = {f"{k}_sha256": hashlib.sha256(part.encode("utf-8")).hexdigest() for k, part in parts.items()}
        return hashes | {f"{k}_characters": len(part) for k, part in parts.items()}


def read_text(cfg: DictConfig) -> Text:
    """The text that ``cfg`` (conf/data) names, cut into a training and a validation part.

    Raises:
        ConfigError: a file is missing, empty, unreadable or not in the given encoding.
    """
    main = "\n\n".join(_read_main(cfg))
    extra = "\n\n".join(_read_files(cfg.extra_path, cfg, key="data.extra_path")) if cfg.extra_path else ""
    cut = len(main) - round(len(main) * cfg.validation_fraction)
    train = f"{extra}\n\n{main[:cut]}" if extra else main[:cut]
    return Text(train=train, validation=main[cut:])


def _read_main(cfg: DictConfig) -> list[str]:
    if cfg.path:
        return _read_files(cfg.path, cfg, key="data.path")
    if cfg.kind == "python_reference":
        from pydoc_data.topics import topics

        return list(topics.values())
    return [_clean(_fetch(cfg.url, Path(cfg.cache_dir).expanduser()), cfg)]


def _read_files(paths: str | Sequence[str], cfg: DictConfig, key: str) -> list[str]:
    return [_clean(_decode(path, cfg.encoding), cfg) for path in _expand(paths, key)]


def _expand(paths: str | Sequence[str], key: str) -> list[Path]:
    """Files, globs and folders to files, in the order given, sorted within a glob or folder."""
    files: list[Path] = []
    for pattern in [paths] if isinstance(paths, str) else paths:
        path = Path(pattern).expanduser()
        if path.is_dir():
            found = sorted(child for child in path.iterdir() if child.is_file() and not child.name.startswith("."))
        else:
            found = [path] if path.is_file() else [Path(match) for match in sorted(glob(str(path), recursive=True))]
            found = [match for match in found if match.is_file()]
        if not found:
            raise ConfigError(f"{key}={pattern}: {'an empty folder' if path.is_dir() else 'no such file'}")
        files += found
    return files


def _decode(path: Path, encodings: str | Sequence[str]) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    encodings = [encodings] if isinstance(encodings, str) else list(encodings)
    failures = []
    for encoding in encodings:
        try:
            text = raw.decode(encoding)
        except UnicodeDecodeError as error:
            failures.append(f"byte {error.start} is not {encoding}")
        except LookupError as error:
            raise ConfigError(f"data.encoding={encoding}: no such encoding") from error
        else:
            return _nonempty(path, text)
    raise ConfigError(f"{path}: {', '.join(failures)}; set data.encoding, for example data.encoding=cp1252")


def _nonempty(path: Path, text: str) -> str:
    if not text.strip("\ufeff \t\r\n"):
        raise ConfigError(f"{path}: empty")
    if "\0" in text:
        where = text.index("\0")
        raise ConfigError(f"{path}: character {where} is NUL: not a text, or in another encoding (data.encoding)")
    return text


def _clean(text: str, cfg: DictConfig) -> str:
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    return strip_gutenberg(text) if cfg.strip_gutenberg else text


def strip_gutenberg(text: str) -> str:
    """The book between Project Gutenberg's START and END lines; a text without them as it is."""
    lines = text.split("\n")
    starts = [i for i, line in enumerate(lines) if line.lstrip().startswith("*** START OF")]
    ends = [i for i, line in enumerate(lines) if line.lstrip().startswith("*** END OF")]
    first = starts[0] + 1 if starts else 0
    last = ends[-1] if ends else len(lines)
    return "\n".join(lines[first:last]).strip("\n") + "\n"


def _fetch(url: str, cache_dir: Path) -> str:
    """Download once; an interrupted download leaves nothing."""
    target = cache_dir / "downloads" / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}.txt"
    if not target.is_file():
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                raw = response.read()
        except (urllib.error.URLError, OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ConfigError(f"data.url={url}: cannot be had ({reason}); set data.path to a local file") from error
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        partial.write_bytes(raw)
        partial.replace(target)
    return _decode(target, "utf-8")


# ---------------------------------------------------------------------------------------------------- blocks


@dataclass(frozen=True)
class Blocks:
    """The packed blocks of one split, (n_blocks, context_length + 1), and what they are made of."""

    tokens: datasets.Dataset
    characters_per_token: float

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: Sequence[int]) -> Tensor:
        """(B, context_length + 1), int64."""
        return torch.as_tensor(np.asarray(self.tokens[list(indices)]["input_ids"]), dtype=torch.long)

    @property
    def context_length(self) -> int:
        return len(self.tokens[0]["input_ids"]) - 1

    def stream(self, n_predicted: int) -> Tensor:
        """The split's first ``n_predicted`` + 1 tokens in their order, or as many as it has: of no block length."""
        rows = self.batch(range(min(len(self), -(-n_predicted // self.context_length))))
        return torch.cat([rows[:, :-1].flatten(), rows[-1, -1:]])[: n_predicted + 1]


def make_blocks(
    text: str, tokenizer: PreTrainedTokenizerBase, context_length: int, *, split: str, cache_dir: Path
) -> Blocks:
    """Tokenise and pack one split, or take it from the cache, whose key is text, tokenizer and context length.

    Raises:
        ConfigError: the split holds less than one block.
    """
    folder = cache_dir / "blocks" / cache_key(text, tokenizer, context_length)
    if not folder.is_dir():
        _save_atomically(*_pack(text, tokenizer, context_length, split), folder)
    tokens = datasets.load_from_disk(str(folder)).with_format("numpy")
    return Blocks(tokens, **json.loads((folder / SUMMARY).read_text(encoding="utf-8")))


def cache_key(text: str, tokenizer: PreTrainedTokenizerBase, context_length: int) -> str:
    digest = hashlib.sha256()
    for part in (str(FORMAT), str(context_length), _fingerprint(tokenizer), text):
        digest.update(part.encode("utf-8"))
        digest.update(b"\0")
    return digest.hexdigest()[:32]


def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))


def _pack(
    text: str, tokenizer: PreTrainedTokenizerBase, context_length: int, split: str
) -> tuple[datasets.Dataset, dict[str, float]]:
    # verbose=False: the tokenizer warns of a text longer than the model's context, which packing is about to cut.
    ids = np.asarray(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int32)
    n_blocks = (len(ids) - 1) // context_length
    if n_blocks < 1:
        raise ConfigError(
            f"context_length={context_length}: the {split} text has {len(ids)} tokens, and one block takes"
            f" {context_length + 1}; shorten the context or give more text (data.path, data.validation_fraction)"
        )
    starts = np.arange(n_blocks)[:, None] * context_length
    table = {"input_ids": list(ids[starts + np.arange(context_length + 1)])}
    return datasets.Dataset.from_dict(table), {"characters_per_token": len(text) / len(ids)}


def _save_atomically(dataset: datasets.Dataset, summary: dict[str, float], folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        datasets.disable_progress_bars()
        dataset.save_to_disk(f"{scratch}/blocks")
        Path(scratch, "blocks", SUMMARY).write_text(json.dumps(summary), encoding="utf-8")
        if not folder.is_dir():  # another process may have been faster
            shutil.move(f"{scratch}/blocks", folder)


# ---------------------------------------------------------------------------------------------------- serving


class BatchStream:
    """The batches of a whole run, in an order that depends on the seed alone, and resumable.

    One pass after the other over all blocks, each in its own random order; a batch may reach over the end of a pass, so
    that accumulation never meets a short batch. With several ranks each takes every world_size-th batch.
    """

    def __init__(
        self, blocks: Blocks, *, batch_size: int, n_batches: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> None:
        self.blocks = blocks
        self.batch_size = batch_size
        self.n_batches = n_batches
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.next_batch = 0

    def __len__(self) -> int:
        return self.n_batches

    def __iter__(self) -> Iterator[Tensor]:
        while self.next_batch < self.n_batches:
            index = self.next_batch * self.world_size + self.rank
            self.next_batch += 1
            yield self.blocks.batch(self._indices(index))
        self.next_batch = 0

    def _indices(self, batch: int) -> list[int]:
        positions = range(batch * self.batch_size, (batch + 1) * self.batch_size)
        return [self._order(p // len(self.blocks))[p % len(self.blocks)] for p in positions]

    def _order(self, passes: int) -> list[int]:
        if getattr(self, "_cached_pass", None) != passes:
            generator = np.random.default_rng((self.seed, passes))
            self._cached_order: list[int] = generator.permutation(len(self.blocks)).tolist()
            self._cached_pass = passes
        return self._cached_order

    def state_dict(self) -> dict[str, Any]:
        return {"next_batch": self.next_batch, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_batch, self.seed = state["next_batch"], state["seed"]


class FixedBatches:
    """The validation batches: all chosen blocks, in order, the last batch possibly short."""

    def __init__(
        self, blocks: Blocks, *, batch_size: int, limit: int | None, rank: int = 0, world_size: int = 1
    ) -> None:
        self.blocks = blocks
        self.batch_size = batch_size
        n_blocks = len(blocks) if limit is None else min(limit, len(blocks))
        # Spread over the whole split: a limited validation should not judge its first pages alone.
        chosen = np.linspace(0, len(blocks) - 1, n_blocks).round().astype(int).tolist()
        self.indices = chosen[rank::world_size]

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[Tensor]:
        for start in range(0, len(self.indices), self.batch_size):
            yield self.blocks.batch(self.indices[start : start + self.batch_size])


class TextData(LightningDataModule):
    """Training and validation blocks as a LightningDataModule.

    Args:
        train, validation: the packed blocks.
        batch_size, validation_batch_size: blocks a batch.
        n_batches: batches of the whole run, over all optimizer steps.
        seed: of the order.
        validation_blocks: how many blocks each validation takes, None = all.
    """

    def __init__(
        self,
        train: Blocks,
        validation: Blocks,
        *,
        batch_size: int,
        validation_batch_size: int,
        n_batches: int,
        seed: int,
        validation_blocks: int | None,
    ) -> None:
        super().__init__()
        self.train, self.validation = train, validation
        self.batch_size, self.validation_batch_size = batch_size, validation_batch_size
        self.n_batches, self.seed, self.validation_blocks = n_batches, seed, validation_blocks

    def _ranks(self) -> dict[str, int]:
        trainer = self.trainer
        return {"rank": trainer.global_rank, "world_size": trainer.world_size} if trainer else {}

    def train_dataloader(self) -> BatchStream:
        return BatchStream(
            self.train, batch_size=self.batch_size, n_batches=self.n_batches, seed=self.seed, **self._ranks()
        )

    def val_dataloader(self) -> FixedBatches:
        return FixedBatches(
            self.validation, batch_size=self.validation_batch_size, limit=self.validation_blocks, **self._ranks()
        )
