"""checkpoints/best.ckpt and checkpoints/last.ckpt, under plain names and at step boundaries only."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint


def save_best(directory: Path) -> ModelCheckpoint:
    """best.ckpt: the lowest val/loss of the validations during training."""
    return ModelCheckpoint(
        dirpath=directory,
        filename="best",
        monitor="val/loss",
        mode="min",
        save_top_k=1,
        auto_insert_metric_name=False,
        enable_version_counter=False,
        save_on_train_epoch_end=False,
    )


class SaveLast(Callback):
    """last.ckpt: every ``every_n_steps`` optimizer steps, at the end, and on Ctrl-C or SIGTERM.

    An interrupt waits for the optimizer step under way, so that the run resumes from the checkpoint bit for bit; a
    second interrupt does not wait.
    """

    def __init__(self, directory: Path, *, every_n_steps: int) -> None:
        self.path = directory / "last.ckpt"
        self.every_n_steps = every_n_steps
        self._saved_step = -1
        self._interrupted = False
        self._previous_handlers: dict[int, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saved_step = trainer.global_step
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous_handlers[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == self._saved_step or trainer.fit_loop._should_accumulate():
            return
        if self._interrupted or step % self.every_n_steps == 0:
            self._save(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._stop_if_saved(trainer)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._stop_if_saved(trainer)

    def _stop_if_saved(self, trainer: Trainer) -> None:
        """Not at the end of the batch already: the metrics of the step are logged after that hook."""
        if self._interrupted and self._saved_step == trainer.global_step:
            raise KeyboardInterrupt

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step != self._saved_step:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        trainer.save_checkpoint(self.path)
        self._saved_step = trainer.global_step

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore_handlers()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        while self._previous_handlers:
            signal.signal(*self._previous_handlers.popitem())
