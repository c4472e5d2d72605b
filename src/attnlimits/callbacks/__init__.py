"""When to measure and where to send it; no mathematics."""

from .attention_probe import AttentionProbe
from .checkpoints import SaveLast, save_best
from .gradient_norms import GradientNorms
from .length_extrapolation import LengthExtrapolation
from .normalizer_parameters import NormalizerParameters
from .progress import Progress
from .rng import RandomState
from .samples import Samples
from .throughput import Throughput

__all__ = [
    "AttentionProbe",
    "GradientNorms",
    "LengthExtrapolation",
    "NormalizerParameters",
    "Progress",
    "RandomState",
    "Samples",
    "SaveLast",
    "Throughput",
    "save_best",
]
