"""When to measure and where to send it; no mathematics."""

from .checkpoints import SaveLast, save_best
from .progress import Progress
from .rng import RandomState
from .throughput import Throughput

__all__ = ["Progress", "RandomState", "SaveLast", "Throughput", "save_best"]
