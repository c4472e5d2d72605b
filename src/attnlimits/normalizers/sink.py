"""Softmax that may attend to nothing: a constant, or one learned logit a head, in the denominator."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .base import JacobianForm, Normalizer, Properties, zero_masked


class Softmax1(Normalizer, name="softmax1"):
    """``p_i = exp(z_i/T) / (1 + sum_j exp(z_j/T))``: softmax over one more key of logit 0, whose value is 0.

    Source: Miller 2023, "Attention is off by one". Lets a head abstain, which softmax buys with a sink token. Vanishes
    as softmax does; the Jacobian norm stays below 1/(2T). A checkpoint trained with softmax starts away from it.
    """

    properties = Properties(
        formula="exp(z_i) / (1 + sum_j exp(z_j))",
        source="Miller 2023",
        row_sum="at most one",
        shift_invariant=False,
        sparse=False,
        length_aware=False,
        jacobian_bound="1/2",
        near_softmax=True,
    )

    def normalize(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        return softmax_with_sink(logits, logits.new_zeros(()), mask)

    def jacobian_form(self, weights: Tensor, mask: Tensor) -> JacobianForm:
        return JacobianForm(weights, 1.0)


class Sink(Normalizer, name="sink"):
    """``p_i = exp(z_i/T) / (exp(sigma) + sum_j exp(z_j/T))``, sigma one learned logit a head.

    Source: gpt-oss 2025 (learned sinks). As softmax1, with the size of the sink learned.

    Args:
        sigma: initial value; -10 is softmax to within exp(-10) of the denominator at zero logits.
    """

    properties = Properties(
        formula="exp(z_i) / (exp(sigma) + sum_j exp(z_j))",
        source="gpt-oss 2025",
        row_sum="at most one",
        shift_invariant=False,
        sparse=False,
        length_aware=False,
        jacobian_bound="1/2",
        near_softmax=True,
    )

    def __init__(self, *, sigma: float = -10.0, T: float = 1.0, n_heads: int = 1, context_length: int = 1024) -> None:
        super().__init__(T=T, n_heads=n_heads, context_length=context_length)
        self.sigma_H = nn.Parameter(torch.full((n_heads,), sigma))

    def normalize(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        return softmax_with_sink(logits, self.sigma_H.to(logits.dtype)[:, None, None], mask)

    def jacobian_form(self, weights: Tensor, mask: Tensor) -> JacobianForm:
        return JacobianForm(weights, 1.0)


def softmax_with_sink(logits: Tensor, sink: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax over the visible keys and one more of logit ``sink`` (broadcast to (..., Q, 1)), without that one."""
    if mask is not None:
        logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    with_sink = torch.cat([logits, sink.expand(*logits.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(with_sink, dim=-1)[..., :-1]
    return zero_masked(weights, mask)
