"""The N keys of largest weight, ties to the earlier key: the set I_N of theory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TopN:
    """The N largest of every row.

    Attributes:
        index: (..., Q, N), the keys.
        inside, outside: (..., Q, K) bool, visible keys in I_N and not in it.
        valid: (..., Q) bool, the row sees more than N keys; elsewhere a value of theory is undefined.
        n: (..., Q), visible keys.
    """

    index: Tensor
    inside: Tensor
    outside: Tensor
    valid: Tensor
    n: Tensor

    @property
    def size(self) -> int:
        return self.index.shape[-1]


def rank_keys(weights: Tensor, mask: Tensor) -> Tensor:
    """Keys by falling weight, ties by position, masked keys last: (..., Q, K)."""
    return weights.masked_fill(~mask, -torch.inf).sort(dim=-1, descending=True, stable=True).indices


def top_n(ranked: Tensor, mask: Tensor, size: int) -> TopN:
    """The first ``size`` of :func:`rank_keys`."""
    mask = mask.expand(ranked.shape)
    index = ranked[..., :size]
    chosen = torch.zeros_like(mask).scatter(-1, index, True)
    n = mask.sum(-1)
    return TopN(index=index, inside=chosen & mask, outside=~chosen & mask, valid=n > size, n=n)
