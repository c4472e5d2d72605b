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

from .base import REGISTRY, JacobianForm, Normalizer, Properties

for _module in pkgutil.iter_modules(__path__):
    if _module.name == "__main__":
        continue
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "NAMING",
    "REGISTRY",
    "JacobianForm",
    "Normalizer",
    "Properties",
    "make_normalizer",
    "normalizer_class",
    "normalizer_options",
]

NAMING = ("name", "_target_")  # the keys of a YAML that say which normalizer; all others are its options


def normalizer_class(spec: Mapping[str, Any]) -> type[Normalizer]:
    """The class that ``spec`` names, by ``_target_`` (a dotted path, for one's own) or else by ``name``.

    Raises:
        ValueError: there is none.
    """
    if target := spec.get("_target_"):
        return _import_normalizer(target)
    if spec.get("name") not in REGISTRY:
        raise ValueError(f"normalizer.name={spec.get('name')}: must be one of {', '.join(sorted(REGISTRY))}")
    return REGISTRY[spec["name"]]


def _import_normalizer(target: str) -> type[Normalizer]:
    module, _, name = target.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"normalizer._target_={target}: cannot be imported ({error})") from error
    if not (inspect.isclass(found) and issubclass(found, Normalizer)):
        raise ValueError(f"normalizer._target_={target}: must be a subclass of attnlimits.normalizers.Normalizer")
    return found


def normalizer_options(kind: type[Normalizer]) -> dict[str, inspect.Parameter]:
    """The keys that a normalizer's YAML may set: its constructor's own arguments."""
    shared = inspect.signature(Normalizer).parameters
    own = inspect.signature(kind).parameters
    return {key: parameter for key, parameter in own.items() if key not in shared}


def make_normalizer(spec: Mapping[str, Any], *, T: float, n_heads: int, context_length: int) -> Normalizer:
    """Build the normalizer that ``spec`` names: ``{"name": "ssmax", "s": 0.2}``.

    Args:
        spec: ``name`` (a key of the registry) or ``_target_``, and the normalizer's own options.
        T: temperature by which the logits are divided.
        n_heads: heads of the layer it serves.
        context_length: longest training row.
    """
    options = {key: value for key, value in spec.items() if key not in NAMING}
    return normalizer_class(spec)(T=T, n_heads=n_heads, context_length=context_length, **options)
