"""Normalizers without competition: every weight depends on its own logit and on how many keys the row sees."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import JacobianForm, Normalizer, Properties, visible_keys, zero_masked


class Sigmoid(Normalizer, name="sigmoid"):
    """``p_i = sigmoid(z_i/T - ln n)``, n = visible keys of the row.

    Source: Ramapuram et al. 2024, arXiv 2409.04431, there with the constant -ln L; per row it is the causal analogue.
    At zero logits a row sums to n/(n+1). No key takes weight from another; the Jacobian is diagonal, norm at most
    1/(4T). A key of fixed logit vanishes as e^z/n, as under softmax.
    """

    properties = Properties(
        formula="sigmoid(z_i - ln n)",
        source="Ramapuram et al. 2024, arXiv 2409.04431",
        row_sum="free",
        shift_invariant=False,
        sparse=False,
        length_aware=True,
        jacobian_bound="1/4",
        near_softmax=False,
    )

    def normalize(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        n = visible_keys(logits, mask).clamp(min=1).to(logits.dtype)
        weights = torch.sigmoid(logits - n.log()[..., None])
        return zero_masked(weights, mask)

    def jacobian_form(self, weights: Tensor, mask: Tensor) -> JacobianForm:
        return JacobianForm(weights * (1 - weights), torch.inf)


class ReLU(Normalizer, name="relu"):
    """``p_i = max(z_i/T, 0) / n``, n = visible keys of the row.

    Source: Wortsman et al. 2023, arXiv 2309.08586, there with the constant L. Exact zeros, a free row sum, and weights
    that vanish as exactly 1/n. A row of negative logits gives 0, and no gradient.
    """

    properties = Properties(
        formula="relu(z_i) / n",
        source="Wortsman et al. 2023, arXiv 2309.08586",
        row_sum="free",
        shift_invariant=False,
        sparse=True,
        length_aware=True,
        jacobian_bound="1/n",
        near_softmax=False,
    )

    def normalize(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        n = visible_keys(logits, mask).clamp(min=1).to(logits.dtype)
        weights = torch.relu(logits) / n[..., None]
        return zero_masked(weights, mask)

    def jacobian_form(self, weights: Tensor, mask: Tensor) -> JacobianForm:
        return JacobianForm((weights > 0) / mask.sum(-1, keepdim=True).clamp(min=1), torch.inf)
