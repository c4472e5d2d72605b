"""The spectral norm of a row's Jacobian d weights / d logits, in memory linear in the number of keys.

Most normalizers have J = f (diag u - u u^T / t) with u >= 0: softmax (u = p, t = 1), softmax with a sink (sum u < t),
entmax (u = p^(2 - alpha), t = sum u), elementwise maps (t = inf). Its largest eigenvalue solves a secular equation. For
the rest the norm is found by power iteration on J^T J, with two products a step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BISECTIONS = 36  # halvings of an interval no wider than max u
CHUNK = 2**17  # elements: a megabyte of float64, which every halving finds in a core's cache
ITERATIONS = 200


def diagonal_minus_rank_one(u: Tensor, t: Tensor | float) -> Tensor:
    """Largest eigenvalue of diag u - u u^T / t, (...,), for u >= 0 of shape (..., K) and t >= sum u.

    It lies between the second largest and the largest u, where sum u_i^2 / (u_i - x) - t rises through 0 once: the
    eigenvalues of a diagonal interlace with those after a rank-one change. Found by bisection to 1e-11 of max u.
    """
    u_NxK = u.double().reshape(-1, u.shape[-1])
    t_Nx1 = torch.as_tensor(t, dtype=torch.float64, device=u.device).expand(u.shape[:-1]).reshape(-1, 1)
    rows = max(1, CHUNK // u.shape[-1])
    found = [_bisect(*pair) for pair in zip(u_NxK.split(rows), t_Nx1.split(rows), strict=True)]
    return torch.cat(found).view(u.shape[:-1])


def _bisect(u: Tensor, t: Tensor) -> Tensor:
    squared, gap = u.square(), torch.empty_like(u)
    largest = u.topk(min(2, u.shape[-1]), dim=-1).values
    high = largest[:, :1]
    low = largest[:, 1:] if u.shape[-1] > 1 else torch.zeros_like(high)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        # Where the middle hits a u the two largest are equal and the answer, whatever this sum is.
        torch.sub(u, middle, out=gap)
        above = torch.div(squared, gap, out=gap).sum(-1, keepdim=True) > t
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return torch.where(torch.isinf(t), largest[:, :1], (low + high) / 2)[:, 0]


def by_power_iteration(function: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    """Largest singular value of every row's Jacobian of ``function``, (...,), rows being independent of each other.

    A lower bound that converges from below; it stops when no row grows by more than 1e-6.
    """
    logits = logits.double()
    pull_back = torch.func.vjp(function, logits)[1]
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(logits.shape, generator=generator, dtype=logits.dtype).to(logits.device)
    norm = torch.zeros(logits.shape[:-1], dtype=logits.dtype, device=logits.device)
    for _ in range(ITERATIONS):
        v = _unit(v)
        jv = torch.func.jvp(function, (logits,), (v,))[1]
        grown = jv.norm(dim=-1)
        (v,) = pull_back(jv)
        settled = (grown - norm).abs().max() <= 1e-6 * grown.max()
        norm = torch.maximum(norm, grown)
        if settled:
            break
    return norm


def _unit(v: Tensor) -> Tensor:
    """v over its length, row by row; zero where v is. By its largest entry first, whose square may not underflow."""
    v = v / v.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(v.dtype).tiny)
    return v / v.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(v.dtype).tiny)
