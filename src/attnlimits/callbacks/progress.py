"""What a user sees while a run trains."""

from __future__ import annotations

import sys
import time
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks.progress import ProgressBar
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from torch import Tensor


class Progress(ProgressBar):
    """Optimizer steps with loss, validation perplexity, tokens/s and time left.

    A bar in a terminal; elsewhere one line every ``every_n_steps`` steps and after each validation.
    """

    def __init__(self, *, every_n_steps: int = 10) -> None:
        super().__init__()
        self.every_n_steps = every_n_steps
        self._enabled = True
        self._bar: RichProgress | None = None
        self._started_at = 0.0
        self._first_step = 0
        self._tokens = 0
        self._loss: Tensor | None = None

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started_at, self._first_step, self._tokens = time.perf_counter(), trainer.global_step, 0
        if self._enabled and sys.stdout.isatty():
            self._bar = RichProgress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.description}"),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self._bar.start()
            self._bar.add_task("", total=trainer.max_steps, completed=trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        self._tokens += batch[:, 1:].numel() * trainer.world_size
        self._loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        if trainer.fit_loop._should_accumulate() or not self._enabled:
            return
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=trainer.global_step, description=self._text(trainer))
        elif trainer.global_step % self.every_n_steps == 0 or trainer.global_step == trainer.max_steps:
            step, left = f"{trainer.global_step}/{trainer.max_steps}", self._seconds_left(trainer)
            print(f"step {step}  {self._text(trainer)}  {left:.0f} s left", flush=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        values = trainer.callback_metrics
        if self._enabled and self._bar is None and "val/loss" in values:
            loss, perplexity = values["val/loss"].item(), values["val/perplexity"].item()
            print(f"step {trainer.global_step}  validation loss {loss:.4f}  perplexity {perplexity:.2f}", flush=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _text(self, trainer: Trainer) -> str:
        elapsed = max(time.perf_counter() - self._started_at, 1e-9)
        parts = [f"loss {self._loss.item():.3f}" if self._loss is not None else ""]
        if "val/perplexity" in trainer.callback_metrics:
            parts.append(f"val ppl {trainer.callback_metrics['val/perplexity'].item():.2f}")
        parts.append(f"{self._tokens / elapsed:,.0f} tokens/s")
        return "  ".join(parts)

    def _seconds_left(self, trainer: Trainer) -> float:
        done = max(1, trainer.global_step - self._first_step)
        return (time.perf_counter() - self._started_at) / done * (trainer.max_steps - trainer.global_step)
