"""Adaptive-scalable entmax: entmax whose sharpness grows with a learned power of the logarithm of the length."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import JacobianForm, Normalizer, Properties, visible_keys
from .entmax import entmax, entmax_jacobian


class ASEntmax(Normalizer, name="asentmax"):
    """``p = entmax_alpha((delta + beta ln(n + 1)^gamma) z / T)``, n = visible keys, beta and gamma learned per head.

    Source: Vasylenko et al. 2025, arXiv 2506.16640, with one beta and gamma a head; the paper also predicts them from
    the hidden state of the query token, which a normalizer does not see. Works against vanishing twice: keys far below
    the largest get exactly 0, and the factor widens the gaps as the row grows. The gradient grows by the same factor.

    Args:
        alpha: between 1 (softmax) and 2 (sparsemax).
        delta: the factor's constant.
        beta: initial value of every head, > 0.
        gamma: initial value of every head.
        learnable: train beta (as softplus of a free number) and gamma.
    """

    properties = Properties(
        formula="entmax_alpha((delta + beta ln(n + 1)^gamma) z)",
        source="Vasylenko et al. 2025, arXiv 2506.16640",
        row_sum="one",
        shift_invariant=True,
        sparse=True,
        length_aware=True,
        jacobian_bound="delta + beta ln(n + 1)^gamma",
        near_softmax=False,
    )

    def __init__(
        self,
        *,
        alpha: float = 1.5,
        delta: float = 1.0,
        beta: float = 0.1,
        gamma: float = 1.0,
        learnable: bool = True,
        T: float = 1.0,
        n_heads: int = 1,
        context_length: int = 1024,
    ) -> None:
        super().__init__(T=T, n_heads=n_heads, context_length=context_length)
        if not 1 <= alpha <= 2:
            raise ValueError(f"normalizer.alpha={alpha}: must lie between 1 and 2")
        if not beta > 0:
            raise ValueError(f"normalizer.beta={beta}: must be > 0")
        self.alpha, self.delta = float(alpha), delta
        self.raw_beta_H = nn.Parameter(torch.full((n_heads,), math.log(math.expm1(beta))), requires_grad=learnable)
        self.gamma_H = nn.Parameter(torch.full((n_heads,), float(gamma)), requires_grad=learnable)

    def learned(self) -> dict[str, Tensor]:
        if not self.gamma_H.requires_grad:
            return {}
        return {"beta": F.softplus(self.raw_beta_H.detach()), "gamma": self.gamma_H.detach()}

    def normalize(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        factor = self.factor(visible_keys(logits, mask), logits.dtype)
        return entmax(logits * factor[..., None], self.alpha, mask)

    def factor(self, n_visible: Tensor, dtype: torch.dtype) -> Tensor:
        """(..., H, Q), by which a row of ``n_visible`` keys is multiplied."""
        log_n = torch.log1p(n_visible.clamp(min=1).to(dtype))
        beta, gamma = F.softplus(self.raw_beta_H.to(dtype)), self.gamma_H.to(dtype)
        return self.delta + beta[:, None] * log_n ** gamma[:, None]

    def jacobian_form(self, weights: Tensor, mask: Tensor) -> JacobianForm:
        return entmax_jacobian(weights, self.alpha, self.factor(mask.sum(-1), weights.dtype))
