"""Random number generators in the checkpoint, so that a resumed run draws what the straight one would have drawn."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer


class RandomState(Callback):
    """Stores the states of Python, NumPy, torch and CUDA as plain types and tensors; Lightning does not.

    They are set when training starts, after everything that draws while a run is being set up.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        version, internal, gauss = random.getstate()
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        return {
            "python": [version, list(internal), gauss],
            "numpy": [str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._loaded is None:
            return
        version, internal, gauss = self._loaded["python"]
        random.setstate((version, tuple(internal), gauss))
        kind, keys, position, has_gauss, cached = self._loaded["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
        torch.set_rng_state(self._loaded["torch"].cpu())
        if self._loaded["cuda"] and len(self._loaded["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all([state.cpu() for state in self._loaded["cuda"]])
        self._loaded = None
