"""train.py's work: a checked configuration in, a run directory out."""

from __future__ import annotations

import csv
import functools
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.errors import InstantiationException
from lightning import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.callbacks.progress import ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from . import backbone, loggers, rundir
from .callbacks import RandomState, Samples, SaveLast, Throughput, save_best
from .config import ConfigError, check, compile_mode, plain
from .data import Blocks, TextData, make_blocks, read_text
from .module import LanguageModel
from .normalizers import newton
from .report import print_report
from .resume import resumed_config
from .session import open_run, quiet


@dataclass(frozen=True)
class Result:
    """What a run gave."""

    directory: Path
    summary: dict[str, Any]
    module: LanguageModel


@dataclass(frozen=True)
class Ingredients:
    """What a run needs; all that can go wrong with the user's files has gone wrong by now."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    train: Blocks
    validation: Blocks
    data_seed: int
    fingerprint: dict[str, Any]


def train(cfg: DictConfig, directory: Path, overrides: Sequence[str] = ()) -> Result:
    """Run one training configuration.

    Args:
        cfg: the composed conf/train.yaml.
        directory: of the run; created here.
        overrides: what the user typed, needed only to resume.

    Raises:
        ConfigError: the user's mistake, before anything is written.
        SystemExit: 130, the run was interrupted and its last.ckpt written.
    """
    if cfg.ckpt_path is not None:
        cfg = resumed_config(cfg.ckpt_path, overrides)
    check(cfg)
    quiet()
    world_size = _probe_hardware(cfg)
    callbacks = _optional_callbacks(cfg)
    newton.set_compile(compile_mode(cfg))
    started = time.perf_counter()
    ingredients = _prepare(cfg)
    go_on = functools.partial(_how_to_go_on, directory)
    with open_run(cfg, directory, resumed_step=_resumed_step(cfg), advice=go_on) as run_loggers:
        n_steps = _n_steps(cfg, len(ingredients.train), world_size)
        result = _fit(cfg, directory, ingredients, n_steps, run_loggers, callbacks, started)
    if loggers.is_first_process():
        print_report(result.directory, result.summary)
    return result


def _prepare(cfg: DictConfig) -> Ingredients:
    if cfg.seed is None:
        print("seed=null: this run is unseeded and cannot be repeated")
    else:
        seed_everything(cfg.seed, workers=True, verbose=False)
    text = read_text(cfg.data)
    if cfg.ckpt_path is not None:
        try:
            model = backbone.fit_out(backbone.load(cfg.ckpt_path), cfg)
        except ValueError as error:
            raise ConfigError(f"ckpt_path={error}") from error
        tokenizer = backbone.load_tokenizer(Path(cfg.ckpt_path).resolve().parents[1] / "tokenizer")
    else:
        model, tokenizer = backbone.build(cfg, corpus=[text.train])
    cache_dir = Path(cfg.data.cache_dir).expanduser()
    train, validation = (
        make_blocks(part, tokenizer, cfg.context_length, split=split, cache_dir=cache_dir)
        for part, split in ((text.train, "training"), (text.validation, "validation"))
    )
    data_seed = random.getrandbits(31) if cfg.seed is None else cfg.seed
    return Ingredients(model, tokenizer, train, validation, data_seed, text.fingerprint())


def _resumed_step(cfg: DictConfig) -> int | None:
    if cfg.ckpt_path is None:
        return None
    # mmap: for one number, do not read the weights and the optimizer again.
    return torch.load(cfg.ckpt_path, map_location="cpu", weights_only=True, mmap=True)["global_step"]


def _how_to_go_on(directory: Path) -> str:
    last = directory / "checkpoints" / "last.ckpt"
    return f"; go on with: python train.py ckpt_path={last}" if last.is_file() else ""


def _fit(
    cfg: DictConfig,
    directory: Path,
    ingredients: Ingredients,
    n_steps: int,
    run_loggers: list[Logger],
    callbacks: list[Callback],
    started: float,
) -> Result:
    ingredients.tokenizer.save_pretrained(directory / "tokenizer")
    for callback in callbacks:
        if isinstance(callback, Samples):
            callback.tokenizer = ingredients.tokenizer
    throughput, best = Throughput(log_every=cfg.trainer.log_every), save_best(directory / "checkpoints")
    last = SaveLast(directory / "checkpoints", every_n_steps=cfg.trainer.validate_every)
    always = [ValidateAtEnd(), RandomState(), best, last]
    trainer = _trainer(cfg, n_steps, run_loggers, [throughput, *callbacks, *always])
    module, data = _module_and_data(cfg, ingredients, n_steps)
    if cfg.ckpt_path is None:
        trainer.validate(module, data, verbose=False)  # every curve starts from the pretrained model
    try:
        trainer.fit(module, data, ckpt_path=cfg.ckpt_path)
    except SystemExit:  # what Lightning makes of a KeyboardInterrupt
        raise KeyboardInterrupt from None
    _export_best(module, best, directory, ingredients.tokenizer)
    summary = _summary(cfg, directory, ingredients, trainer, throughput, time.perf_counter() - started)
    if trainer.is_global_zero:
        rundir.write_json(directory / "summary.json", summary)
    return Result(directory, summary, module)


def _module_and_data(cfg: DictConfig, ingredients: Ingredients, n_steps: int) -> tuple[LanguageModel, TextData]:
    module = LanguageModel(
        ingredients.model,
        optimizer=plain(cfg.optimizer),
        n_steps=cfg.optimizer.schedule_steps or n_steps,
        characters_per_token=ingredients.validation.characters_per_token,
    )
    data = TextData(
        ingredients.train,
        ingredients.validation,
        batch_size=cfg.data.batch_size,
        validation_batch_size=cfg.data.validation_batch_size,
        n_batches=n_steps * cfg.trainer.accumulate,
        seed=ingredients.data_seed,
        validation_blocks=cfg.trainer.validation_blocks,
    )
    return module, data


def _optional_callbacks(cfg: DictConfig) -> list[Callback]:
    """The callbacks of conf/callbacks, one of each."""
    made = []
    for name, node in cfg.callbacks.items():
        try:
            made.append(hydra.utils.instantiate(node))
        except InstantiationException as error:
            reason = str(error.__cause__ or error).splitlines()[0]
            raise ConfigError(f"callbacks.{name}={plain(node)}: {reason}") from error
    return made


def _hardware(cfg: DictConfig) -> dict[str, Any]:
    options = cfg.trainer
    return {
        "accelerator": options.accelerator,
        "devices": plain(options.devices),
        "strategy": options.strategy,
        "precision": "32-true" if options.precision == "32" else options.precision,
    }


def _probe_hardware(cfg: DictConfig) -> int:
    """How many processes will train, before anything is loaded; refuses what this machine does not have."""
    chosen = ", ".join(f"trainer.{key}={value}" for key, value in _hardware(cfg).items())
    try:
        trainer = Trainer(**_hardware(cfg), logger=False, enable_checkpointing=False, enable_progress_bar=False)
    except (MisconfigurationException, ValueError, RuntimeError) as error:
        raise ConfigError(f"{chosen}: {str(error).splitlines()[0]}") from error
    if cfg.trainer.precision == "16-mixed" and trainer.strategy.root_device.type != "cuda":
        raise ConfigError("trainer.precision=16-mixed: needs a GPU; bf16-mixed and 32 run anywhere")
    return trainer.world_size


def _trainer(cfg: DictConfig, n_steps: int, run_loggers: list[Logger], callbacks: list[Callback]) -> Trainer:
    options = cfg.trainer
    return Trainer(
        **_hardware(cfg),
        logger=run_loggers,
        callbacks=callbacks,
        max_steps=n_steps,
        max_epochs=-1,  # the batches are one long stream
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=options.clip,
        val_check_interval=options.validate_every * options.accumulate,
        check_val_every_n_epoch=None,
        log_every_n_steps=options.log_every,
        num_sanity_val_steps=0,
        deterministic=options.deterministic,
        enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in callbacks),
        enable_model_summary=False,
        use_distributed_sampler=False,  # the stream of batches knows its rank
    )


def _n_steps(cfg: DictConfig, n_blocks: int, world_size: int) -> int:
    """Optimizer steps of the run: as asked, or as many as the passes over the training blocks take."""
    if cfg.trainer.max_steps is not None:
        return cfg.trainer.max_steps
    return math.ceil(cfg.trainer.max_epochs * n_blocks / (cfg.data.batch_size * cfg.trainer.accumulate * world_size))


class ValidateAtEnd(Callback):
    """Lightning validates every so many batches; the last step is validated too."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step >= trainer.max_steps:
            trainer.should_stop = True


def _export_best(
    module: LanguageModel, best: ModelCheckpoint, directory: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    if module.trainer.is_global_zero:
        model = backbone.load(best.best_model_path) if best.best_model_path else module.backbone
        backbone.save(model, directory / "model", tokenizer)


def _summary(
    cfg: DictConfig,
    directory: Path,
    ingredients: Ingredients,
    trainer: Trainer,
    throughput: Throughput,
    seconds: float,
) -> dict[str, Any]:
    validations = validation_rows(directory / "metrics.csv")
    before, after = validations[0], validations[-1]
    best = min(validations[1:] or validations, key=lambda row: row["val/loss"])
    return {
        "name": cfg.name,
        "exit_reason": "completed",
        **{key: after[key] for key in after if key != "step"},
        "before": before,
        "after": after,
        "best": best,
        "steps": trainer.global_step,
        "tokens": throughput.tokens,
        "tokens_per_second": round(throughput.tokens_per_second, 1),
        "seconds": round(seconds, 1),
        "parameters": sum(p.numel() for p in ingredients.model.parameters()),
        "normalizer": plain(cfg.normalizer),
        "T": cfg.T,
        "context_length": cfg.context_length,
        "text": ingredients.fingerprint,
    }


def validation_rows(metrics_csv: Path) -> list[dict[str, float]]:
    """The validations of a run, in order, from its metrics.csv."""
    with metrics_csv.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("val/loss")]
    keys = ("step", "val/loss", "val/perplexity", "val/bits_per_character")
    return [{key: float(row[key]) for key in keys} for row in rows]
