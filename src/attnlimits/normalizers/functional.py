"""Every normalizer of the registry as a function: ``functional.sparsemax(logits, mask=None, dim=-1, T=1.0)``.

    from attnlimits.normalizers import functional as N

    weights = N.entmax(logits, mask, alpha=1.25)
    weights = N.ssmax(logits, s=0.4, dim=1)

The options are those of the normalizer's YAML, as constants: to train them, use the module (``make_normalizer``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .base import REGISTRY, Normalizer


def __getattr__(name: str) -> Callable[..., Tensor]:
    if name not in REGISTRY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; there are {', '.join(sorted(REGISTRY))}")
    return _function(REGISTRY[name])


def __dir__() -> list[str]:
    return sorted(REGISTRY)


def _function(kind: type[Normalizer]) -> Callable[..., Tensor]:
    def function(logits: Tensor, mask: Tensor | None = None, *, dim: int = -1, **options: Any) -> Tensor:
        if mask is not None:
            mask = mask.expand_as(logits).movedim(dim, -1)
        rows = logits.movedim(dim, -1)
        as_heads = (1, -1, rows.shape[-1])  # (H, Q, K): a head of many rows
        normalizer = kind(**options).to(logits.device).requires_grad_(False)
        weights = normalizer(rows.reshape(as_heads), None if mask is None else mask.reshape(as_heads))
        return weights.view(rows.shape).movedim(-1, dim)

    function.__name__ = function.__qualname__ = kind.name
    function.__doc__ = f"""{kind.__doc__}

    As a function: ``logits`` of any shape, ``mask`` (bool, True = visible) that broadcasts to it, keys along ``dim``;
    ``T`` and the options above as keywords. Returns the weights, shaped as ``logits``.
    """
    return function
