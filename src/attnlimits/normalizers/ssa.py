"""Scaled signed averaging: polynomial instead of exponential weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .base import Normalizer, Properties, masked_softmax


class SSA(Normalizer, name="ssa"):
    """``p_i = F(z_i/T) / sum_j F(z_j/T)``, ``F(z) = (1 + b |z|)^(m sgn z)``, b > 0 and m >= 1 learned per head.

    Source: Naim et al. 2025, arXiv 2508.14685. Logits count polynomially, so the Jacobian norm is at most m b / (2T);
    for the same reason a leading key vanishes faster than under softmax. b = 1/m with large m approaches softmax.

    Args:
        b, m: initial values of every head.
        learnable: train both, as log b and log m.
    """

    properties = Properties(
        formula="F(z_i) / sum_j F(z_j), F(z) = (1 + b|z|)^(m sgn z)",
        source="Naim et al. 2025, arXiv 2508.14685",
        row_sum="one",
        shift_invariant=False,
        sparse=False,
        length_aware=False,
        jacobian_bound="m b / 2",
        near_softmax=True,
    )

    def __init__(
        self,
        *,
        b: float = 0.125,
        m: float = 8.0,
        learnable: bool = True,
        T: float = 1.0,
        n_heads: int = 1,
        context_length: int = 1024,
    ) -> None:
        super().__init__(T=T, n_heads=n_heads, context_length=context_length)
        if b <= 0 or m < 1:
            raise ValueError(f"normalizer.b={b} normalizer.m={m}: b must be > 0 and m at least 1")
        self.log_b_H = nn.Parameter(torch.full((n_heads,), math.log(b)), requires_grad=learnable)
        self.log_m_H = nn.Parameter(torch.full((n_heads,), math.log(m)), requires_grad=learnable)

    def learned(self) -> dict[str, Tensor]:
        if not self.log_b_H.requires_grad:
            return {}
        return {"b": self.log_b_H.detach().exp(), "m": self.log_m_H.detach().exp().clamp(min=1)}

    def normalize(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        b = self.log_b_H.to(logits.dtype).exp()[:, None, None]
        m = self.log_m_H.to(logits.dtype).exp().clamp(min=1)[:, None, None]
        return masked_softmax(m * torch.sign(logits) * torch.log1p(b * logits.abs()), mask)
