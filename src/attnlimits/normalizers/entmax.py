"""alpha-entmax: the family between softmax (alpha = 1) and sparsemax (alpha = 2), exact, without sorting."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .base import Normalizer, Properties, masked_softmax


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
        if self.raw_alpha_H is not None:
            return entmax(logits, 1 + torch.sigmoid(self.raw_alpha_H.to(logits.dtype))[:, None, None], mask)
        return entmax(logits, self.alpha, mask)


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
    )

    def normalize(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        return entmax(logits, 1.5, mask)


def entmax(logits: Tensor, alpha: float | Tensor, mask: Tensor | None = None) -> Tensor:
    """alpha-entmax of every row; alpha is a number in [1, 2], or a tensor in (1, 2] that broadcasts to (..., Q, 1)."""
    if isinstance(alpha, (int, float)) and alpha == 1:
        return masked_softmax(logits, mask)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    solved: Tensor
    if isinstance(alpha, Tensor):
        solved = _EntmaxLearned.apply(logits, alpha)
    else:
        solved = _EntmaxFixed.apply(logits, float(alpha))
    return solved


def solve(logits: Tensor, alpha: float | Tensor) -> Tensor:
    """The weights by Newton's method, without gradient; a row of -inf gives 0.

    With y = (alpha - 1)(z - max z), q = 1/(alpha - 1) and r = (y - tau)_+ the root of ||r||_q = 1 is sought from
    tau = -1. The norm is convex in tau and falls, so that tau rises monotonically and never passes the root. The passes
    end when every row sums to 1 within rounding, or no tau moves any more; what is left is divided out.
    """
    row_max = logits.amax(-1, keepdim=True)
    y = (logits - row_max.masked_fill(row_max == -torch.inf, 0.0)) * (alpha - 1)
    q = 1 / (alpha - 1)
    tolerance = 8 * torch.finfo(logits.dtype).eps
    tau = torch.full_like(row_max, -1.0)
    while True:
        r = (y - tau).clamp(min=0)
        lower = _power(r, q - 1).masked_fill(r <= 0, 0.0)
        total = (lower * r).sum(-1, keepdim=True)
        step = (total ** (1 / q) - 1) * total ** (1 - 1 / q) / lower.sum(-1, keepdim=True)
        moved = torch.where(total > 1 + tolerance, torch.maximum(tau, tau + step), tau)
        if torch.equal(moved, tau):
            return lower * r / total.masked_fill(total == 0, 1.0)
        tau = moved


def _power(base: Tensor, exponent: float | Tensor) -> Tensor:
    if isinstance(exponent, float) and exponent == 1.0:
        return base
    return base**exponent


# Operators of their own, so that torch.compile and vmap need not look into a loop whose length depends on the data.
@torch.library.custom_op("attnlimits::entmax", mutates_args=())
def _solve_fixed(logits: Tensor, alpha: float) -> Tensor:
    return solve(logits, alpha)


@torch.library.custom_op("attnlimits::entmax_learned", mutates_args=())
def _solve_learned(logits: Tensor, alpha: Tensor) -> Tensor:
    return solve(logits, alpha)


@_solve_fixed.register_fake
@_solve_learned.register_fake
def _(logits: Tensor, alpha: float | Tensor) -> Tensor:
    return torch.empty_like(logits)


@_solve_fixed.register_vmap
def _(info: Any, in_dims: tuple[int, None], logits: Tensor, alpha: float) -> tuple[Tensor, int]:
    return _solve_fixed(logits.movedim(in_dims[0], 0), alpha), 0


@_solve_learned.register_vmap
def _(info: Any, in_dims: tuple[int | None, int | None], logits: Tensor, alpha: Tensor) -> tuple[Tensor, int]:
    logits = logits.expand(info.batch_size, *logits.shape) if in_dims[0] is None else logits.movedim(in_dims[0], 0)
    if in_dims[1] is not None:
        alpha = alpha.movedim(in_dims[1], 0)
        missing = logits.ndim - alpha.ndim
        alpha = alpha.reshape(alpha.shape[0], *(1,) * missing, *alpha.shape[1:])
    return _solve_learned(logits, alpha), 0


class _EntmaxFixed(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, alpha: float) -> Tensor:
        return _solve_fixed(logits, alpha)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.alpha = inputs[1]
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (weights,) = ctx.saved_tensors
        return _grad_logits(weights, ctx.alpha, grad)[0], None


class _EntmaxLearned(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, alpha: Tensor) -> Tensor:
        return _solve_learned(logits, alpha)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output, inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        weights, alpha = ctx.saved_tensors
        grad_logits, share, inside = _grad_logits(weights, alpha, grad)
        by_alpha = torch.where(weights > 0, grad, 0.0) * _alpha_derivative(weights, inside, share, alpha)
        return grad_logits, by_alpha.sum_to_size(alpha.shape)


def _grad_logits(weights: Tensor, alpha: float | Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """J grad, J = diag(u) - u u^T / sum u, u = p^(2 - alpha) on the support; also u / sum u, and p with 1 off it."""
    support = weights > 0
    inside = torch.where(support, weights, 1.0)  # any positive number: powers and logarithms stay finite
    u = torch.where(support, inside ** (2 - alpha), 0.0)
    share = u / u.sum(-1, keepdim=True).clamp(min=torch.finfo(u.dtype).tiny)
    grad = torch.where(support, grad, 0.0)
    return u * grad - u * (share * grad).sum(-1, keepdim=True), share, inside


def _alpha_derivative(weights: Tensor, inside: Tensor, share: Tensor, alpha: Tensor) -> Tensor:
    """dp/dalpha. Near alpha = 1 its two terms cancel, and the limit -1/2 (diag p - p p^T) (ln p)^2 takes over."""
    a, log_p = alpha - 1, inside.log()
    first = (weights - share) / a**2
    second = (weights * log_p - share * (weights * log_p).sum(-1, keepdim=True)) / a
    squared = weights * log_p**2
    limit = -0.5 * (squared - weights * squared.sum(-1, keepdim=True))
    # The difference is off by about eps/a^2, the limit by about a.
    return torch.where(a < torch.finfo(weights.dtype).eps ** (1 / 3), limit, first - second)
