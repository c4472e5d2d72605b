"""Softmax, GPT-2's own normalizer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .base import Normalizer, Properties, masked_softmax


class Softmax(Normalizer, name="softmax"):
    """``p_i = exp(z_i / T) / sum_j exp(z_j / T)``; learnable: T times exp(t), one learned t a head.

    The largest Jacobian norm is 1/(2T), at a two-way tie. For bounded logits every weight is O(1/n). A learned
    temperature lets a head choose how sharp it is, not how that depends on the length.

    Args:
        learnable: train t, which starts at 0.
    """

    properties = Properties(
        formula="exp(z_i) / sum_j exp(z_j)",
        source="the usual softmax",
        row_sum="one",
        shift_invariant=True,
        sparse=False,
        length_aware=False,
        jacobian_bound="1/2",
        near_softmax=True,
    )
    rescales_rows = True

    def __init__(
        self, *, learnable: bool = False, T: float = 1.0, n_heads: int = 1, context_length: int = 1024
    ) -> None:
        super().__init__(T=T, n_heads=n_heads, context_length=context_length)
        self.log_T_H = nn.Parameter(torch.zeros(n_heads)) if learnable else None

    def row_scale(self, n_visible: Tensor) -> Tensor | None:
        return None if self.log_T_H is None else torch.exp(-self.log_T_H)[:, None]

    def learned(self) -> dict[str, Tensor]:
        return {} if self.log_T_H is None else {"T": self.T * self.log_T_H.detach().exp()}

    def normalize(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        if self.log_T_H is not None:
            logits = logits * torch.exp(-self.log_T_H.to(logits.dtype))[:, None, None]
        return masked_softmax(logits, mask)
