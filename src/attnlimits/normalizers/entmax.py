"""alpha-entmax: the family between softmax (alpha = 1) and sparsemax (alpha = 2), exact, without sorting."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import CustomOpDef

from . import newton
from .base import JacobianForm, Normalizer, Properties, masked_softmax


class Entmax(Normalizer, name="entmax"):
    """``p_i = [(alpha - 1) z_i/T - tau]_+ ^ (1 / (alpha - 1))`` with tau such that the row sums to 1.

    Source: Peters, Niculae & Martins 2019, arXiv 1905.05702; learned alpha: Correia et al. 2019, arXiv 1909.00015. Keys
    more than T/(alpha - 1) below the largest get exactly 0. For bounded logits it vanishes as n^(-1/alpha), slower than
    softmax.

    Args:
        alpha: between 1 (softmax) and 2 (sparsemax).
        learnable: train it, one a head, as 1 + sigmoid(a); then it must start strictly between 1 and 2.
    """

    properties = Properties(
        formula="((alpha - 1) z_i - tau)_+^(1/(alpha - 1))",
        source="Peters et al. 2019, arXiv 1905.05702; Correia et al. 2019, arXiv 1909.00015",
        row_sum="one",
        shift_invariant=True,
        sparse=True,
        length_aware=False,
        jacobian_bound="1",
        near_softmax=False,
    )

    def __init__(
        self,
        *,
        alpha: float = 1.5,
        learnable: bool = False,
        T: float = 1.0,
        n_heads: int = 1,
        context_length: int = 1024,
    ) -> None:
        super().__init__(T=T, n_heads=n_heads, context_length=context_length)
        if not 1 <= alpha <= 2 or (learnable and not 1 < alpha < 2):
            raise ValueError(f"normalizer.alpha={alpha}: must lie between 1 and 2, and strictly so if learnable")
        self.alpha = float(alpha)
        raw = math.log(alpha - 1) - math.log(2 - alpha) if learnable else 0.0
        self.raw_alpha_H = nn.Parameter(torch.full((n_heads,), raw)) if learnable else None

    def normalize(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        return entmax(logits, self._alpha(logits.dtype), mask)

    def learned(self) -> dict[str, Tensor]:
        return {} if self.raw_alpha_H is None else {"alpha": 1 + torch.sigmoid(self.raw_alpha_H.detach())}

    def _alpha(self, dtype: torch.dtype) -> float | Tensor:
        if self.raw_alpha_H is None:
            return self.alpha
        return 1 + torch.sigmoid(self.raw_alpha_H.to(dtype))[:, None, None]

    def jacobian_form(self, weights: Tensor, mask: Tensor) -> JacobianForm:
        return entmax_jacobian(weights, self._alpha(weights.dtype))


class Entmax15(Normalizer, name="entmax15"):
    """``p_i = (z_i/(2T) - tau)_+ ^ 2`` with tau such that the row sums to 1: entmax with alpha = 1.5.

    Source: Peters, Niculae & Martins 2019, arXiv 1905.05702. Keys more than 2T below the largest get exactly 0.
    """

    properties = Properties(
        formula="(z_i/2 - tau)_+^2",
        source="Peters et al. 2019, arXiv 1905.05702",
        row_sum="one",
        shift_invariant=True,
        sparse=True,
        length_aware=False,
        jacobian_bound="1",
        near_softmax=False,
    )

    def normalize(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        return entmax(logits, 1.5, mask)

    def jacobian_form(self, weights: Tensor, mask: Tensor) -> JacobianForm:
        return entmax_jacobian(weights, 1.5)


def entmax(logits: Tensor, alpha: float | Tensor, mask: Tensor | None = None) -> Tensor:
    """alpha-entmax of every row; masked keys, and rows without visible keys, get 0.

    Args:
        logits: (..., K), float32 or float64.
        alpha: a number in [1, 2], or a tensor in (1, 2] that broadcasts to (..., 1).
        mask: bool, broadcastable to ``logits``, True = visible.
    """
    if isinstance(alpha, (int, float)):
        if alpha == 1:
            return masked_softmax(logits, mask)
        alpha = float(alpha)
    solved: Tensor = _Entmax.apply(logits, mask, alpha)
    return solved


def entmax_jacobian(weights: Tensor, alpha: float | Tensor, factor: Tensor | float = 1.0) -> JacobianForm:
    """Of alpha-entmax of logits that are multiplied by ``factor``, at these weights."""
    u = newton.metric(weights, alpha)
    return JacobianForm(u, u.sum(-1), factor)


# Operators of their own, so that torch.compile and vmap need not look into loops whose length depends on the data.
@torch.library.custom_op("attnlimits::entmax", mutates_args=())
def _solve_fixed(logits: Tensor, mask: Tensor | None, alpha: float) -> Tensor:
    return newton.solve(logits, alpha, mask)


@torch.library.custom_op("attnlimits::entmax_learned", mutates_args=())
def _solve_learned(logits: Tensor, mask: Tensor | None, alpha: Tensor) -> Tensor:
    return newton.solve(logits, alpha, mask)


@torch.library.custom_op("attnlimits::entmax_backward", mutates_args=())
def _pull_back(weights: Tensor, grad: Tensor, alpha: float) -> Tensor:
    return newton.pull_back(weights, grad, alpha)


@_solve_fixed.register_fake
@_solve_learned.register_fake
@_pull_back.register_fake
def _(first: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(first, memory_format=torch.contiguous_format)


def _register_vmap(operator: CustomOpDef) -> None:
    """The mapped dimension becomes the first one of the rows; what is not mapped broadcasts."""

    def mapped(info: Any, in_dims: tuple[int | None, ...], first: Tensor, *others: Any) -> tuple[Tensor, int]:
        dim = in_dims[0]
        first = first.expand(info.batch_size, *first.shape) if dim is None else first.movedim(dim, 0)
        moved = (
            other if along is None else _aligned(other.movedim(along, 0), first.ndim)
            for other, along in zip(others, in_dims[1:], strict=True)
        )
        return operator(first, *moved), 0

    operator.register_vmap(mapped)


def _aligned(tensor: Tensor, ndim: int) -> Tensor:
    """Its first dimension stays first, the others stay last."""
    return tensor.reshape(tensor.shape[0], *(1,) * (ndim - tensor.ndim), *tensor.shape[1:])


for _operator in (_solve_fixed, _solve_learned, _pull_back):
    _register_vmap(_operator)


class _Entmax(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, mask: Tensor | None, alpha: float | Tensor) -> Tensor:
        return (_solve_learned if isinstance(alpha, Tensor) else _solve_fixed)(logits, mask, alpha)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None, float | Tensor], output: Tensor) -> None:
        ctx.alpha = None if isinstance(inputs[2], Tensor) else inputs[2]
        ctx.save_for_backward(output, *([inputs[2]] if ctx.alpha is None else []))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None]:
        weights, *learned = ctx.saved_tensors
        alpha = learned[0] if learned else ctx.alpha
        if not learned and not torch.is_grad_enabled():  # no second derivative is wanted: the fast way
            return _pull_back(weights, grad, alpha), None, None
        # Off the support a positive number in place of 0: powers and their derivatives stay finite.
        inside = torch.where(weights > 0, weights, 1.0)
        u = torch.where(weights > 0, inside ** (2 - alpha), 0.0)
        grad_logits = newton.project(u, grad)
        if not learned:
            return grad_logits, None, None
        by_alpha = torch.where(weights > 0, grad, 0.0) * _alpha_derivative(weights, inside, u, alpha)
        return grad_logits, None, by_alpha.sum_to_size(alpha.shape)


def _alpha_derivative(weights: Tensor, inside: Tensor, u: Tensor, alpha: Tensor) -> Tensor:
    """dp/dalpha. Near alpha = 1 its two terms cancel, and the limit -1/2 (diag p - p p^T) (ln p)^2 takes over."""
    share = u / u.sum(-1, keepdim=True).clamp(min=torch.finfo(u.dtype).tiny)
    a, log_p = alpha - 1, inside.log()
    first = (weights - share) / a**2
    second = (weights * log_p - share * (weights * log_p).sum(-1, keepdim=True)) / a
    squared = weights * log_p**2
    limit = -0.5 * (squared - weights * squared.sum(-1, keepdim=True))
    # The difference is off by about eps/a^2, the limit by about a.
    return torch.where(a < torch.finfo(weights.dtype).eps ** (1 / 3), limit, first - second)
