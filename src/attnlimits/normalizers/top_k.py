"""Softmax over the k largest logits of a row."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import JacobianForm, Normalizer, Properties, masked_softmax


class TopK(Normalizer, name="top_k"):
    """``p = softmax of the k largest visible logits / T``, 0 elsewhere.

    Exactly k keys also where logits tie at the k-th value (which of them is left to torch.topk); all visible keys where
    a row sees fewer. The largest weight
    is at least 1/k whatever the length, so it does not vanish; keys outside the k get no gradient. Within them it is
    softmax, with its Jacobian norm of at most 1/(2T).

    Args:
        k: how many keys, at least 1.
    """

    properties = Properties(
        formula="softmax over the k largest",
        source="common practice",
        row_sum="one",
        shift_invariant=True,
        sparse=True,
        length_aware=False,
        jacobian_bound="1/2",
        near_softmax=False,
    )

    def __init__(self, *, k: int = 8, T: float = 1.0, n_heads: int = 1, context_length: int = 1024) -> None:
        super().__init__(T=T, n_heads=n_heads, context_length=context_length)
        if k < 1:
            raise ValueError(f"normalizer.k={k}: must be at least 1")
        self.k = k

    def normalize(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        visible = torch.ones_like(logits, dtype=torch.bool) if mask is None else mask.expand_as(logits)
        if self.k >= logits.shape[-1]:
            return masked_softmax(logits, mask)
        ranked = logits.masked_fill(~visible, -torch.inf)
        chosen = torch.zeros_like(visible).scatter(-1, ranked.topk(self.k, dim=-1).indices, True)
        return masked_softmax(logits, chosen & visible)

    def jacobian_form(self, weights: Tensor, mask: Tensor) -> JacobianForm:
        return JacobianForm(weights, 1.0)
