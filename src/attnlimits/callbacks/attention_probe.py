"""Attention metrics of every head on a fixed probe batch while a run trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from ..capacity import Settings, measure_layer
from ..loggers import draw_heads, layer_means, log_heads, log_scalars
from ..metrics.verdict import VERDICTS, Thresholds
from ..probe import probe_with_gradients


class AttentionProbe(Callback):
    """Measures at every validation, and every ``every_n_steps`` optimizer steps between.

    Scalars ``attention/<metric>`` (mean over layers and heads) and ``attention/<metric>/layer_07`` (over its heads) go
    to every logger; every head's values go to heads.parquet in the run directory and, at validations, to W&B as one
    table and one heatmap a metric of ``heatmaps``. docs/metrics.md lists them. Rank 0 measures alone.

    Args:
        every_n_steps: optimizer steps between; null = at validations only.
        blocks: validation blocks of the probe batch, always the same ones.
        rows: query rows of each, spread over its length, the last among them.
        top_n, top_k: of the metrics that have an N.
        heatmaps: metrics to draw.
        thresholds: of the verdict a head (metrics/verdict.py).
    """

    def __init__(
        self,
        *,
        every_n_steps: int | None = 50,
        blocks: int = 1,
        rows: int = 128,
        top_n: Sequence[int] = (5, 20),
        top_k: int = 10,
        heatmaps: Sequence[str] = (),
        thresholds: dict[str, float] | None = None,
    ) -> None:
        for key, value in (("every_n_steps", every_n_steps or 1), ("blocks", blocks), ("rows", rows), ("top_k", top_k)):
            if value < 1:
                raise ValueError(f"{key}={value}: must be at least 1")
        if not top_n or min(top_n) < 1:
            raise ValueError(f"top_n={list(top_n)}: must be numbers of at least 1")
        self.every_n_steps, self.blocks, self.rows = every_n_steps, blocks, rows
        self.settings = Settings(tuple(sorted(top_n)), top_k, Thresholds(**(thresholds or {})))
        self.heatmaps = tuple(heatmaps)
        self._step = -1
        self._heads: dict[str, Tensor] = {}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self._measure(trainer, pl_module)
            draw_heads(trainer.loggers, self._heads, trainer.global_step, self.heatmaps)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        due = self.every_n_steps is not None and trainer.global_step % self.every_n_steps == 0
        if due and trainer.is_global_zero and not trainer.fit_loop._should_accumulate():
            self._measure(trainer, pl_module)

    def _measure(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step = trainer.global_step
        if step == self._step:  # a validation right after a step that was measured
            return
        self._step, self._heads = step, self.measure(pl_module, self.probe_batch(trainer, pl_module))
        log_scalars(trainer.loggers, summarize(self._heads), step)
        log_heads(trainer.loggers, self._heads, step)

    def probe_batch(self, trainer: Trainer, pl_module: LightningModule) -> Tensor:
        """(blocks, L + 1): from the beginning of the validation split, or as many as it has."""
        blocks = trainer.datamodule.validation  # type: ignore[attr-defined]
        return blocks.batch(list(range(min(self.blocks, len(blocks))))).to(pl_module.device)

    def measure(self, pl_module: LightningModule, tokens_BxL1: Tensor) -> dict[str, Tensor]:
        """Every metric by name, (layers, H) on the CPU."""
        layers, gradients = probe_with_gradients(
            pl_module.backbone,  # type: ignore[arg-type]
            tokens_BxL1,
            lambda view: measure_layer(view, self.settings),
            n_rows=self.rows,
        )
        heads = {name: torch.stack([layer[name] for layer in layers]).cpu() for name in layers[0]}
        heads["logit_gradient"] = gradients.cpu()
        return heads


def summarize(heads: dict[str, Tensor]) -> dict[str, float]:
    """The scalars of a probe: means over heads that are defined; of verdicts the share of heads that have each."""
    scalars: dict[str, float] = {}
    for name, values in heads.items():
        if name == "verdict":
            shares = {f"verdict_{word}": (values == index).double() for index, word in enumerate(VERDICTS)}
        else:
            shares = {name: values}
        for key, table in shares.items():
            scalars |= layer_means(f"attention/{key}", table)
    return {key: value for key, value in scalars.items() if value == value}
