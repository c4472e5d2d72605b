"""Scalable-Softmax: softmax whose sharpness grows with the logarithm of the row's length."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .base import Normalizer, Properties, masked_softmax, visible_keys


class SSMax(Normalizer, name="ssmax"):
    """``p = softmax((s ln(n) + b) z / T)``, n = visible keys of the row, one learnable s, and b, per head.

    Source: Nakanishi 2025, arXiv 2501.19399, which recommends no bias for long contexts. Without it, a key that leads
    all others by more than T/s keeps its weight however long the row gets, and a row with one visible key has factor 0
    and gives no gradient to s.

    Args:
        s: initial value of every head; None chooses 1 / mean of ln n over the rows 1..context_length, so that a model
            that was trained with softmax starts from an average factor of 1.
        learnable: train s, and b where there is one.
        bias: add b, which starts at 0.
    """

    properties = Properties(
        formula="softmax((s ln(n) + b) z)",
        source="Nakanishi 2025, arXiv 2501.19399",
        row_sum="one",
        shift_invariant=True,
        sparse=False,
        length_aware=True,
        jacobian_bound="|s ln(n) + b| / 2",
        near_softmax=True,
    )
    rescales_rows = True

    def __init__(
        self,
        *,
        s: float | None = None,
        learnable: bool = True,
        bias: bool = False,
        T: float = 1.0,
        n_heads: int = 1,
        context_length: int = 1024,
    ) -> None:
        super().__init__(T=T, n_heads=n_heads, context_length=context_length)
        if s is None:
            s = 1.0 / torch.arange(1, max(context_length, 2) + 1, dtype=torch.float64).log().mean().item()
        self.s_H = nn.Parameter(torch.full((n_heads,), s), requires_grad=learnable)
        self.b_H = nn.Parameter(torch.zeros(n_heads), requires_grad=learnable) if bias else None

    def row_scale(self, n_visible: Tensor) -> Tensor:
        # A fully masked row has n = 0; its factor is irrelevant but must stay finite.
        log_n = n_visible.clamp(min=1).to(self.s_H.dtype).log()
        scale = self.s_H[:, None] * log_n
        return scale if self.b_H is None else scale + self.b_H[:, None]

    def normalize(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        scale = self.row_scale(visible_keys(logits, mask)).to(logits.dtype)
        return masked_softmax(logits * scale[..., None], mask)
