"""The N keys of largest weight, ties to the earlier key: the set I_N of theory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TopN:
    """The N largest of every row.

    Attributes:
        index: (..., Q, N), the keys, by falling weight.
        outside: (..., Q, K) float64, 1 at visible keys that are not in I_N, else 0.
        valid: (..., Q) bool, the row sees more than N keys; elsewhere a value of theory is undefined.
        n: (..., Q), visible keys.
    """

    index: Tensor
    outside: Tensor
    valid: Tensor
    n: Tensor

    @property
    def size(self) -> int:
        return self.index.shape[-1]

    def take(self, values: Tensor) -> Tensor:
        """(..., Q, N): of values (..., Q or 1, K) those at I_N."""
        return values.expand_as(self.outside).gather(-1, self.index)

    def where_valid(self, values: Tensor) -> Tensor:
        """The values (..., Q), NaN where the row sees no more than N keys."""
        return values.masked_fill(~self.valid, torch.nan)


def rank_keys(weights: Tensor, mask: Tensor) -> Tensor:
    """Keys by falling weight, ties by position, masked keys last: (..., Q, K)."""
    return weights.masked_fill(~mask, -torch.inf).sort(dim=-1, descending=True, stable=True).indices


def top_n(ranked: Tensor, visible: Tensor, size: int) -> TopN:
    """The first ``size`` of :func:`rank_keys`.

    Args:
        ranked: (..., Q, K), or at least the first ``size`` of each row.
        visible: (..., Q, K) float64, 1 at visible keys, else 0.
        size: N.
    """
    index = ranked[..., :size]
    n = visible.sum(-1)
    return TopN(index=index, outside=visible.scatter(-1, index, 0.0), valid=n > size, n=n)
