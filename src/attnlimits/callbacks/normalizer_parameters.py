"""What the normalizers have learnt so far."""

from __future__ import annotations

from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only

from ..attention import attention_layers
from ..loggers import layer_means, log_scalars


class NormalizerParameters(Callback):
    """``normalizer/<parameter>`` (mean over layers and heads) and ``normalizer/<parameter>/layer_07`` (over its heads).

    As they act on weights: alpha and beta, not the free numbers behind them. Nothing is logged for a normalizer without
    learned parameters.

    Args:
        every_n_steps: optimizer steps between.
    """

    def __init__(self, *, every_n_steps: int = 5) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps}: must be at least 1")
        self.every_n_steps = every_n_steps

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == 0:
            self._log(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step % self.every_n_steps == 0 and not trainer.fit_loop._should_accumulate():
            self._log(trainer, pl_module)

    @rank_zero_only
    def _log(self, trainer: Trainer, pl_module: LightningModule) -> None:
        layers = [layer.normalizer.learned() for _, layer in attention_layers(pl_module.backbone)]  # type: ignore[operator,union-attr,arg-type]
        scalars: dict[str, float] = {}
        for name in layers[0]:
            scalars |= layer_means(f"normalizer/{name}", torch.stack([layer[name] for layer in layers]).double())
        if scalars:
            log_scalars(trainer.loggers, scalars, trainer.global_step)
