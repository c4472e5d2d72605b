"""The cumulative distance of the unselected keys from the selected sum, its bounds, and its expectations.

For a row of weights a, representations x and I_N its N largest weights: s = sum over I_N of a_i x_i, and

    d~ = sum over i outside I_N of ||a_i x_i - s||.

Distances come from Gram identities in float64, never from a tensor of differences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .topn import TopN


@dataclass(frozen=True)
class Terms:
    """What does not depend on N, in float64; y_i = a_i x_i and Y their sum over the visible keys."""

    weights: Tensor  # (..., Q, K)
    x: Tensor  # (..., K, D)
    norms: Tensor  # (..., 1, K), of x
    y_squared: Tensor  # (..., Q, K)
    y_dot_sum: Tensor  # (..., Q, K), y_i . Y
    sum_squared: Tensor  # (..., Q, 1)


def terms(weights: Tensor, x: Tensor) -> Terms:
    """Of weights (..., Q, K) that are 0 at masked keys, and representations x (..., K, D)."""
    a, x = weights.double(), x.double()
    norms = x.norm(dim=-1)[..., None, :]
    y_sum = a @ x
    inner = a * (y_sum @ x.transpose(-1, -2))
    return Terms(a, x, norms, (a * norms).square(), inner, y_sum.square().sum(-1, keepdim=True))


def distance(weights: Tensor, x: Tensor, top: TopN, *, sums_to_one: bool, of: Terms | None = None) -> dict[str, Tensor]:
    """The values by name, (..., Q), NaN where the row sees no more than N keys.

    Args:
        weights: (..., Q, K), 0 at masked keys.
        x: (..., K, D), representations of the keys.
        top: the N largest of every row.
        sums_to_one: rows sum to 1, without which the published bound does not apply (NaN).
        of: :func:`terms` of the two, where several N share them.
    """
    of = terms(weights, x) if of is None else of
    a, norms = of.weights, of.norms
    s = (a * top.inside) @ of.x
    s_norm = s.norm(dim=-1)
    inner = s @ of.x.transpose(-1, -2)
    from_s = (of.y_squared - 2 * a * inner + s_norm[..., None].square()).clamp(min=0).sqrt()
    d = (from_s * top.outside).sum(-1)
    outside_mass = (a.abs() * top.outside).sum(-1)
    centre = (top.n - top.size) * s_norm
    width = outside_mass * (norms * top.outside).amax(-1)
    values = {
        "distance": d,
        "selected_norm": s_norm,
        "distance_lower": (centre - width).clamp(min=0),
        "distance_upper": centre + width,
        "distance_published": _published(a, x, norms, top) if sums_to_one else torch.full_like(d, torch.nan),
        **expectations(of, top),
    }
    values["distance_slack"] = values["distance_upper"] - d
    values["distance_published_slack"] = values["distance_published"] - d
    return {name: value.masked_fill(~top.valid, torch.nan) for name, value in values.items()}


def _published(a: Tensor, x: Tensor, norms: Tensor, top: TopN) -> Tensor:
    """Theorem 1: (1 - abar) d1 + max over I_N ||x_j|| ((n - N) abar - (1 - abar)), d1 the widest pair across I_N."""
    abar = (a * top.inside).sum(-1)
    longest = (norms * top.inside).amax(-1)
    # Nothing cancels in the widest gap: it is found in the precision that came.
    return (1 - abar) * _widest_pair(x, top).double() + longest * ((top.n - top.size) * abar - (1 - abar))


def _widest_pair(x: Tensor, top: TopN) -> Tensor:
    """max ||x_i - x_j|| over i outside and j inside, a key of I_N at a time: no K x K tensor for all heads at once."""
    squared = x.square().sum(-1)[..., None, :]
    hidden = torch.where(top.outside, 0.0, -torch.inf).to(x.dtype)
    widest = torch.zeros(top.valid.shape, dtype=x.dtype, device=x.device)
    for rank in range(top.size):
        j = top.index[..., rank]
        x_j = x.gather(-2, j[..., None].expand(*j.shape, x.shape[-1]))
        gaps = torch.add(squared, x_j @ x.transpose(-1, -2), alpha=-2).add_(hidden).amax(-1)
        widest = torch.maximum(widest, gaps + x_j.square().sum(-1))
    return widest.clamp(min=0).sqrt()


def expectations(of: Terms, top: TopN) -> dict[str, Tensor]:
    """E d~ for I_N uniform over all N-subsets of the visible keys: what is provable, and two readings of the paper.

    With y_i = a_i x_i, Y their sum, c = N/(n - 1) and m_i = (1 + c) y_i - c Y the expectation lies between
    ((n - N)/n) sum ||m_i|| (Jensen; it is also the published main sum) and ((n - N)/n) sum sqrt(||m_i||^2 + V_i), V_i
    the variance of the selected sum. ``no_factor`` leaves out c: m_i = y_i - sum of the others.
    """
    visible = top.inside | top.outside
    n, size = top.n.double(), float(top.size)
    y_squared, inner, sum_squared = of.y_squared, of.y_dot_sum, of.sum_squared
    c = (size / (n - 1))[..., None]
    m_squared = ((1 + c).square() * y_squared - 2 * c * (1 + c) * inner + c.square() * sum_squared).clamp(min=0)
    spread = size * (n - 1 - size) / ((n - 1) * (n - 2)).masked_fill(n < 3, torch.nan)
    others_squared = y_squared.sum(-1, keepdim=True) - y_squared
    rest_squared = sum_squared - 2 * inner + y_squared  # ||Y - y_i||^2
    variance = spread[..., None] * (others_squared - rest_squared / (n - 1)[..., None]).clamp(min=0)
    no_factor = (4 * y_squared - 4 * inner + sum_squared).clamp(min=0)
    share = (n - size) / n
    return {
        "expected_distance_lower": share * (m_squared.sqrt() * visible).sum(-1),
        "expected_distance_upper": share * ((m_squared + variance).sqrt() * visible).sum(-1),
        "expected_distance_no_factor": share * (no_factor.sqrt() * visible).sum(-1),
    }
