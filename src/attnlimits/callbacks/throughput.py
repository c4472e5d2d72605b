"""How fast a run trains."""

from __future__ import annotations

import time
from typing import Any

from lightning import Callback, LightningModule, Trainer
from torch import Tensor


class Throughput(Callback):
    """Logs ``train/tokens_per_second``: predicted tokens over the seconds spent in training steps, validation excluded.

    The logged value is that of the last ``log_every`` optimizer steps; :attr:`tokens_per_second` is the run's.
    """

    def __init__(self, *, log_every: int) -> None:
        self.log_every = log_every
        self.tokens = 0
        self.seconds = 0.0
        self._started = 0.0
        self._last = (0, 0.0)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A resumed run goes on counting."""
        self.tokens, self.seconds = self._last = (state_dict["tokens"], state_dict["seconds"])

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Tensor, batch_idx: int) -> None:
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        self.seconds += time.perf_counter() - self._started
        self.tokens += batch[:, 1:].numel() * trainer.world_size
        if trainer.global_step % self.log_every == 0 and not trainer.fit_loop._should_accumulate():
            tokens, seconds = self._last
            if self.seconds > seconds:
                pl_module.log("train/tokens_per_second", (self.tokens - tokens) / (self.seconds - seconds))
            self._last = (self.tokens, self.seconds)
