"""Softpick: softmax's shape with exact zeros and no need to sum to 1."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Normalizer, Properties


class Softpick(Normalizer, name="softpick"):
    """``p_i = relu(exp(z_i/T) - 1) / (sum_j |exp(z_j/T) - 1| + eps)``, sums over visible keys.

    Source: Zuhri, Fuadi & Aji 2025, arXiv 2504.20966. Keys of negative logit get exactly 0, so a head needs no sink.
    Disperses like softmax on rows of noise, and its Jacobian has no bound near zero logits. A checkpoint trained with
    softmax starts away from it.

    Args:
        eps: keeps a row of zero logits finite; relative to a largest term of 1.
    """

    properties = Properties(
        formula="relu(exp(z_i) - 1) / sum_j |exp(z_j) - 1|",
        source="Zuhri et al. 2025, arXiv 2504.20966",
        row_sum="at most one",
        shift_invariant=False,
        sparse=True,
        length_aware=False,
        jacobian_bound="none",
        near_softmax=False,
    )

    def __init__(self, *, eps: float = 1e-8, T: float = 1.0, n_heads: int = 1, context_length: int = 1024) -> None:
        super().__init__(T=T, n_heads=n_heads, context_length=context_length)
        self.eps = eps

    def normalize(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        # A masked key of logit 0 adds |exp(0) - 1| = 0, where one of -inf would add 1.
        visible = logits if mask is None else logits.masked_fill(~mask, 0.0)
        # exp(z) - 1 over exp(m), m = max(z, 0): expm1 for z near 0, the difference of exponentials beyond overflow.
        m = visible.detach().amax(-1, keepdim=True).clamp(min=0)
        near = torch.expm1(visible.clamp(max=1.0)) * torch.exp(-m)
        far = torch.exp(visible - m) - torch.exp(-m)
        excess = torch.where(visible < 1.0, near, far)
        return torch.relu(excess) / (excess.abs().sum(-1, keepdim=True) + self.eps)
