"""Self-adjusted softmax: softmax weighted by where a logit lies in its row."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Normalizer, Properties, masked_softmax, zero_masked


class SASoftmax(Normalizer, name="sa_softmax"):
    """``p_i = w(z_i) softmax(z)_i``, z = logits / T, minimum and maximum over visible keys.

    =======  ==================================================================
    variant  w(z)
    =======  ==================================================================
    0        z
    1        z - min
    2        (z - min) / (max - min)
    3        (z - m) / (M - m), m = min(min, 0), M = max(max, 0)
    =======  ==================================================================

    Source: Zheng et al. 2025, arXiv 2502.18277; variant 3 is its default. Gradients do not die where softmax saturates.
    Rows are not renormalised: under 2 and 3 they sum to at most 1, under 0 to anything. It vanishes as softmax does,
    and has no Jacobian bound. Where max = min (2) or M = m (3), w is 1. A single key of negative logit gets 0 under 3.
    """

    properties = Properties(
        formula="w(z_i) softmax(z)_i",
        source="Zheng et al. 2025, arXiv 2502.18277",
        row_sum="free",
        shift_invariant=False,
        sparse=False,
        length_aware=False,
        jacobian_bound="none",
        near_softmax=False,
    )

    def __init__(self, *, variant: int = 3, T: float = 1.0, n_heads: int = 1, context_length: int = 1024) -> None:
        super().__init__(T=T, n_heads=n_heads, context_length=context_length)
        if variant not in range(4):
            raise ValueError(f"normalizer.variant={variant}: must be 0, 1, 2 or 3")
        self.variant = variant

    def normalize(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        adjusted = masked_softmax(logits, mask) * self._adjustment(logits, mask)
        return zero_masked(adjusted, mask)

    def _adjustment(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        if self.variant == 0:
            return logits
        low, high = _visible_range(logits, mask)
        if self.variant == 3:
            low, high = low.clamp(max=0), high.clamp(min=0)
        if self.variant == 1:
            return logits - low
        width = high - low
        return torch.where(width > 0, (logits - low) / torch.where(width > 0, width, 1.0), 1.0)


def _visible_range(logits: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Minimum and maximum over the visible keys of each row, (..., 1); 0 where there are none."""
    if mask is None:
        return logits.amin(-1, keepdim=True), logits.amax(-1, keepdim=True)
    any_visible = mask.any(-1, keepdim=True)
    low = logits.masked_fill(~mask, torch.inf).amin(-1, keepdim=True)
    high = logits.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True)
    return torch.where(any_visible, low, 0.0), torch.where(any_visible, high, 0.0)
