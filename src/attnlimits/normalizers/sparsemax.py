"""Sparsemax: the Euclidean projection of the logits onto the probability simplex."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import Normalizer, Properties


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
    )

    def normalize(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        return sparsemax(logits, mask)


def sparsemax(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sparsemax of every row; masked keys, and rows without visible keys, get 0."""
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    return _Sparsemax.apply(logits)


def project_on_simplex(logits: Tensor) -> Tensor:
    """Exact projection of every row onto the simplex; a row of -inf gives 0.

    Newton's method on f(tau) = sum (z - tau)_+ - 1 from tau = max z - 1, where f >= 0. f is convex and piecewise
    linear, so tau rises monotonically and reaches the root exactly once the support stands still: a finite number of
    passes (at most about ten in practice), without a sort.
    """
    row_max = logits.amax(-1, keepdim=True)
    shifted = logits - row_max.masked_fill(row_max == -torch.inf, 0.0)
    tau = torch.full_like(row_max, -1.0)
    size = torch.full_like(row_max, -1)
    while True:
        excess = (shifted - tau).clamp_(min=0)
        new_size = (excess > 0).sum(-1, keepdim=True).to(tau.dtype)
        if torch.equal(new_size, size):
            return excess
        # Rounding must not let tau fall: the support would grow again and could alternate for ever.
        tau = torch.maximum(tau, tau + (excess.sum(-1, keepdim=True) - 1) / new_size.clamp(min=1))
        size = new_size


# An operator of its own, so that torch.compile and vmap need not look into a loop whose length depends on the data.
@torch.library.custom_op("attnlimits::sparsemax", mutates_args=())
def _solve(logits: Tensor) -> Tensor:
    return project_on_simplex(logits)


@_solve.register_fake
def _(logits: Tensor) -> Tensor:
    return torch.empty_like(logits)


@_solve.register_vmap
def _(info: Any, in_dims: tuple[int], logits: Tensor) -> tuple[Tensor, int]:
    return _solve(logits.movedim(in_dims[0], 0)), 0


class _Sparsemax(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor) -> Tensor:
        return _solve(logits)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        support = weights > 0
        on_support = torch.where(support, grad, 0.0)
        mean = on_support.sum(-1, keepdim=True) / support.sum(-1, keepdim=True).clamp(min=1)
        return torch.where(support, on_support - mean, 0.0)
