"""Elastic softmax: softmax less a learned share of the uniform weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .base import Normalizer, Properties, masked_softmax, visible_keys, zero_masked


class Elastic(Normalizer, name="elastic"):
    """``p_i = relu(softmax(z/T)_i + tau / n)``, n = visible keys of the row, tau one learned scalar a head.

    Source: Lazy Attention 2026, arXiv 2601.00919. With tau = -1, the paper's start, a key must beat the uniform weight
    to count at all, so rows of noise give exact zeros and need no sink; a checkpoint starts close to itself with 0.
    The rest is not renormalised; it vanishes as softmax does.

    Args:
        tau: initial value of every head; 0 is softmax.
    """

    properties = Properties(
        formula="relu(softmax(z)_i + tau/n)",
        source="Lazy Attention 2026, arXiv 2601.00919",
        row_sum="free",
        shift_invariant=True,
        sparse=True,
        length_aware=True,
        jacobian_bound="1/2",
        near_softmax=True,
    )

    def __init__(self, *, tau: float = 0.0, T: float = 1.0, n_heads: int = 1, context_length: int = 1024) -> None:
        super().__init__(T=T, n_heads=n_heads, context_length=context_length)
        self.tau_H = nn.Parameter(torch.full((n_heads,), tau))

    def normalize(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        n = visible_keys(logits, mask).clamp(min=1).to(logits.dtype)
        offset = self.tau_H.to(logits.dtype)[:, None] / n
        weights = torch.relu(masked_softmax(logits, mask) + offset[..., None])
        return zero_masked(weights, mask)
