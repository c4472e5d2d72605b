"""Sparsemax: the Euclidean projection of the logits onto the probability simplex."""

from __future__ import annotations

from torch import Tensor

from .base import JacobianForm, Normalizer, Properties
from .entmax import entmax, entmax_jacobian


class Sparsemax(Normalizer, name="sparsemax"):
    """``p = argmin over the simplex of ||p - z/T||^2 = (z/T - tau)_+`` with tau such that the row sums to 1.

    Source: Martins & Astudillo 2016, arXiv 1602.02068. Keys more than T below the largest get exactly 0, and no
    gradient. The Jacobian is the projection diag(1_S) - 1_S 1_S^T/|S| on the support S, over T: its norm is 1/T as soon
    as the support holds two keys, whatever the length.
    """

    properties = Properties(
        formula="(z_i - tau)_+",
        source="Martins & Astudillo 2016, arXiv 1602.02068",
        row_sum="one",
        shift_invariant=True,
        sparse=True,
        length_aware=False,
        jacobian_bound="1",
        near_softmax=False,
    )

    def normalize(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        return entmax(logits, 2.0, mask)

    def jacobian_form(self, weights: Tensor, mask: Tensor) -> JacobianForm:
        return entmax_jacobian(weights, 2.0)
