"""Softmax, GPT-2's own normalizer."""

from __future__ import annotations

from torch import Tensor

from .base import Normalizer, Properties, masked_softmax


class Softmax(Normalizer, name="softmax"):
    """``p_i = exp(z_i / T) / sum_j exp(z_j / T)``.

    The largest Jacobian norm is 1/(2T), at a two-way tie. For bounded logits every weight is O(1/n).
    """

    properties = Properties(
        formula="exp(z_i) / sum_j exp(z_j)",
        source="the usual softmax",
        row_sum="one",
        shift_invariant=True,
        sparse=False,
        length_aware=False,
        jacobian_bound="1/2",
    )
    rescales_rows = True

    def normalize(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        return masked_softmax(logits, mask)
