"""Attention normalizers: logits and mask in, weights out. Pure torch; knows nothing of models, metrics or logging.

Every module of this folder is imported here, and a class that names itself enters the registry: a new normalizer is one
file here and one YAML in conf/normalizer/.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from typing import Any

from .base import REGISTRY, Normalizer

for _module in pkgutil.iter_modules(__path__):
    if _module.name == "__main__":
        continue
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["REGISTRY", "Normalizer", "make_normalizer", "normalizer_options"]


def normalizer_options(name: str) -> dict[str, inspect.Parameter]:
    """The keys that a normalizer's YAML may set: its constructor's own arguments."""
    shared = inspect.signature(Normalizer).parameters
    own = inspect.signature(REGISTRY[name]).parameters
    return {key: parameter for key, parameter in own.items() if key not in shared}


def make_normalizer(spec: Mapping[str, Any], *, T: float, n_heads: int, context_length: int) -> Normalizer:
    """Build the normalizer that ``spec`` names: ``{"name": "ssmax", "s": 0.2}``.

    Args:
        spec: ``name`` (a key of the registry) and the normalizer's own options.
        T: temperature by which the logits are divided.
        n_heads: heads of the layer it serves.
        context_length: longest training row.
    """
    options = dict(spec)
    name = options.pop("name")
    if name not in REGISTRY:
        raise ValueError(f"normalizer.name={name}: unknown; there are {', '.join(sorted(REGISTRY))}")
    return REGISTRY[name](T=T, n_heads=n_heads, context_length=context_length, **options)
