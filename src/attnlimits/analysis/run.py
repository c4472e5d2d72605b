"""analyze.py's work: a checked configuration in, a run directory with the report out."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import backbone, loggers
from ..attention import SETTINGS, attach, attention_layers
from ..config import ConfigError, check_analysis, compile_mode, plain
from ..data import Text, make_blocks, read_text
from ..normalizers import newton
from ..session import open_run, quiet
from .experiments import Analysis, analyze, refuse_not_finite
from .report import write_report
from .settings import Settings

EVERY_SECONDS = 10  # between two lines of progress where stdout is no terminal


@dataclass(frozen=True)
class Result:
    """What an analysis gave."""

    directory: Path
    analysis: Analysis
    summary: dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """What is analysed; all that can go wrong with the user's files has gone wrong by now."""

    model: PreTrainedModel
    input_ids_PxL: Tensor
    about: dict[str, Any]


def run(cfg: DictConfig, directory: Path, overrides: Sequence[str] = ()) -> Result:
    """Run one analysis.

    Args:
        cfg: the composed conf/analyze.yaml.
        directory: of the run; created here.
        overrides: what the user typed: whether a checkpoint keeps its normalizer and T.

    Raises:
        ConfigError: the user's mistake, before anything is written.
        SystemExit: 130, the analysis was interrupted.
    """
    check_analysis(cfg)
    quiet()
    newton.set_compile(compile_mode(cfg))
    settings = Settings.of(plain(cfg.analysis), seed=cfg.seed)
    started = time.perf_counter()
    subject = _prepare(cfg, settings, overrides)
    with open_run(cfg, directory) as run_loggers:
        total = len(list(attention_layers(subject.model))) * len(subject.input_ids_PxL)
        with _progress(total) as advance:
            analysis = analyze(subject.model, subject.input_ids_PxL, settings, after_layer=advance)
        about = subject.about | {"seconds": round(time.perf_counter() - started, 1)}
        summary = write_report(analysis, directory, about)
        loggers.log_analysis(run_loggers, analysis.tables(), directory)
    _print_report(directory, analysis)
    return Result(directory, analysis, summary)


def _prepare(cfg: DictConfig, settings: Settings, overrides: Sequence[str]) -> Subject:
    text = read_text(cfg.data)
    model, tokenizer = _subject(cfg, text, overrides)
    source = "model.path" if cfg.ckpt_path is None else "ckpt_path"
    try:
        refuse_not_finite(model)
    except ValueError as error:
        raise ConfigError(f"{source}={cfg.model.path if cfg.ckpt_path is None else cfg.ckpt_path}: {error}") from error
    _check_length(cfg, model)
    ids = _passages(cfg, text, tokenizer)
    return Subject(model.eval(), ids, _about(cfg, settings, ids, overrides))


def _check_length(cfg: DictConfig, model: PreTrainedModel) -> None:
    positions = getattr(model.config, "max_position_embeddings", None)
    if cfg.context_length < 4 or (positions and cfg.context_length > positions):
        allowed = f"between 4 and {positions}, the positions of the model" if positions else "at least 4"
        raise ConfigError(f"context_length={cfg.context_length}: must be {allowed}")


def _subject(cfg: DictConfig, text: Text, overrides: Sequence[str]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if cfg.ckpt_path is None:
        return backbone.build(cfg, corpus=[text.train])
    path = Path(cfg.ckpt_path)
    if not path.is_file() and not _has_normalizer(path):
        model, tokenizer = backbone.pretrained(path, key="ckpt_path")
        return _with_its_own(model, cfg, overrides), tokenizer
    try:
        model = backbone.load(path)
        tokenizer = backbone.load_tokenizer(path.resolve().parents[1] / "tokenizer" if path.is_file() else path)
    except (OSError, ValueError) as error:
        line = str(error).splitlines()[0].removeprefix(f"{path}: ")
        raise ConfigError(f"ckpt_path={path}: {line}") from error
    return _with_its_own(model, cfg, overrides), tokenizer


def _has_normalizer(folder: Path) -> bool:
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"ckpt_path={folder}: {'holds no config.json' if folder.is_dir() else 'no such file or folder'}"
        )
    return f'"{SETTINGS}"' in (folder / "config.json").read_text(encoding="utf-8")


def _with_its_own(model: PreTrainedModel, cfg: DictConfig, overrides: Sequence[str]) -> PreTrainedModel:
    """The checkpoint's normalizer and T, with its learned parameters, but for what the user typed; cfg then says so."""
    own = getattr(model.config, SETTINGS, None)
    typed = {override.lstrip("+").split("=")[0].split(".")[0] for override in overrides}
    if own is None:
        return attach(model, plain(cfg.normalizer), T=cfg.T, context_length=cfg.context_length)
    with open_dict(cfg):
        cfg.T = cfg.T if "T" in typed else own["T"]
        cfg.normalizer = cfg.normalizer if "normalizer" in typed else own["spec"]
    learned = {key: value for key, value in model.state_dict().items() if ".normalizer." in key}
    attach(model, plain(cfg.normalizer), T=cfg.T, context_length=own["context_length"])
    if "normalizer" not in typed:
        model.load_state_dict(learned, strict=False)
    return model


def _passages(cfg: DictConfig, text: Text, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """(P, L): the first blocks of the validation text, each without the token that only a loss would need."""
    cache_dir = Path(cfg.data.cache_dir).expanduser()
    blocks = make_blocks(text.validation, tokenizer, cfg.context_length, split="validation", cache_dir=cache_dir)
    wanted = cfg.analysis.passages
    if wanted > len(blocks):
        allowed = f"at most {len(blocks)}, the blocks of {cfg.context_length} tokens in the validation text"
        raise ConfigError(f"analysis.passages={wanted}: must be {allowed}")
    return blocks.batch(range(wanted))[:, :-1]


def _about(cfg: DictConfig, settings: Settings, ids_PxL: Tensor, overrides: Sequence[str]) -> dict[str, Any]:
    n_passages, length = ids_PxL.shape
    # A checkpoint is told apart by the run it lies in, a model by its own name.
    source = _short(cfg.ckpt_path, 3) if cfg.ckpt_path else _short(cfg.model.path or "random weights (model=scratch)")
    named = {"name": cfg.name, "model": source, "text": _short(cfg.data.path or cfg.data.kind)}
    named |= {"normalizer": cfg.normalizer.name, "T": cfg.T, "L": length, "passages": n_passages}
    named |= {"rows a head": n_passages * length, "x": settings.representation, "logits": settings.logits}
    return named | {"beginning-of-text token": "none", "seed": settings.seed}


def _short(path: Any, parts: int = 1) -> str:
    """As given, of a long or absolute path the last ``parts``."""
    text = str(plain(path))
    is_long = len(text) > 60 or Path(text).is_absolute()
    return "/".join(Path(text).parts[-parts:]) if is_long else text


# ------------------------------------------------------------------------------------------------------- terminal


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """Layers done and time left: a bar in a terminal, elsewhere a line every EVERY_SECONDS."""
    if not sys.stdout.isatty():
        yield _lines_of_progress(total)
        return
    columns = (TextColumn("layers"), MofNCompleteColumn(), BarColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


def _lines_of_progress(total: int) -> Callable[[], None]:
    started = last = time.perf_counter()
    done = 0

    def advance() -> None:
        nonlocal done, last
        done, now = done + 1, time.perf_counter()
        if now - last >= EVERY_SECONDS or done == total:
            last = now
            print(f"layer {done}/{total}  {(now - started) / done * (total - done):.0f} s left", flush=True)

    return advance


def _print_report(directory: Path, analysis: Analysis) -> None:
    shown = Path(os.path.relpath(directory))
    table = Table(title="Claims of the paper, on this model", show_lines=True)
    for column in ("section", "claim", "shown", "verdict"):
        table.add_column(column)
    for row in analysis.claims.to_dict("records"):
        if row["verdict"] != "not measured":
            table.add_row(*row.values())
    console = Console(highlight=False)
    console.print(table, width=max(console.width, 120))
    if "verdict" in analysis.heads:
        counts = ", ".join(f"{count} {word}" for word, count in analysis.heads["verdict"].value_counts().items())
        console.print(f"heads          {counts} of {len(analysis.heads)}")
    Console(highlight=False, soft_wrap=True).print(
        f"report         {shown}/report.html\ntables         {shown}/tables/"
    )
