"""The cumulative distance of the unselected keys from the selected sum, its bounds, and its expectations.

For a row of weights a, representations x and I_N its N largest weights: s = sum over I_N of a_i x_i, and

    d~ = sum over i outside I_N of ||a_i x_i - s||.

Distances come from Gram identities in float64, never from a tensor of differences; what several N share is computed
once. A distance that is 0 comes out as up to 1e-8 of ||s||.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..bounds import expected_distance, limit_distance, selected_distance
from .topn import TopN


@dataclass(frozen=True)
class Terms:
    """Weights and representations of some rows in float64, and what does not depend on N; y_i = a_i x_i, Y their sum.

    Attributes:
        weights: (..., Q, K), 0 at masked keys.
        x: (..., K, D).
        visible: (..., Q, K), 1 at visible keys, else 0.
    """

    weights: Tensor
    x: Tensor
    visible: Tensor

    @cached_property
    def norms(self) -> Tensor:
        """||x_i||, (..., 1, K)."""
        return self.x.norm(dim=-1)[..., None, :]

    @cached_property
    def y_squared(self) -> Tensor:
        return (self.weights * self.norms).square_()

    @cached_property
    def y_sum(self) -> Tensor:
        return self.weights @ self.x

    @cached_property
    def y_dot_sum(self) -> Tensor:
        return (self.y_sum @ self.x.transpose(-1, -2)).mul_(self.weights)

    @cached_property
    def sum_squared(self) -> Tensor:
        return self.y_sum.square().sum(-1)

    @cached_property
    def magnitudes(self) -> Tensor:
        return self.weights.abs()

    @cached_property
    def norm_sum(self) -> Tensor:
        """The sum of ||y_i||."""
        return row_dot(self.magnitudes, self.norms.expand_as(self.weights))

    @cached_property
    def no_factor_sum(self) -> Tensor:
        """The sum of ||y_i - sum of the others||."""
        four = torch.full_like(self.sum_squared, 4.0)
        return self.root_sum(four, -four, self.sum_squared)

    def root_sum(self, a: Tensor, b: Tensor, constant: Tensor) -> Tensor:
        """Sum over visible keys of sqrt(a ||y_i||^2 + b y_i . Y + constant), coefficients a row."""
        squared = torch.mul(self.y_squared, a[..., None]).addcmul_(self.y_dot_sum, b[..., None])
        return row_dot(squared.add_(constant[..., None]).clamp_(min=0).sqrt_(), self.visible)

    def selected_sum(self, top: TopN) -> Tensor:
        """s, (..., Q, D)."""
        chosen = torch.zeros_like(self.weights).scatter_(-1, top.index, top.take(self.weights))
        return chosen @ self.x


def terms(weights: Tensor, x: Tensor, mask: Tensor) -> Terms:
    """Of weights (..., Q, K) that are 0 at masked keys, representations x (..., K, D), and the mask, True = visible."""
    return Terms(weights.double(), x.double(), mask.expand_as(weights).double())


def row_dot(p: Tensor, q: Tensor) -> Tensor:
    """Sum over keys of p q."""
    return torch.linalg.vecdot(p, q)


def distance(of: Terms, top: TopN, *, widest: Tensor | None = None) -> dict[str, Tensor]:
    """The values by name, (..., Q), NaN where the row sees no more than N keys.

    Args:
        of: weights and representations of the rows.
        top: the N largest of every row.
        widest: d1 of :func:`widest_pairs`; without it the published bound is left out.
    """
    s = of.selected_sum(top)
    s_squared = s.square().sum(-1)
    by_name = {"distance": _outside_distance(of, top, s, s_squared), "selected_norm": s_squared.sqrt()}
    pair = selected_distance(
        top.n,
        top.size,
        selected_mass=top.take(of.weights).sum(-1),
        selected_norm=by_name["selected_norm"],
        widest_pair=torch.full_like(s_squared, torch.nan) if widest is None else widest,
        longest_inside=top.take(of.norms).amax(-1),
        longest_outside=(of.norms * top.outside).amax(-1),
        outside_mass=row_dot(of.magnitudes, top.outside),
    )
    by_name |= {"distance_lower": pair.provable.lower, "distance_upper": pair.provable.upper}  # type: ignore[dict-item]
    if widest is not None:
        by_name["distance_published"] = pair.published.upper  # type: ignore[assignment]
    return {name: top.where_valid(value) for name, value in by_name.items()}


def _outside_distance(of: Terms, top: TopN, s: Tensor, s_squared: Tensor) -> Tensor:
    inner = s @ of.x.transpose(-1, -2)
    squared = inner.mul_(of.weights).mul_(-2).add_(of.y_squared).add_(s_squared[..., None])
    return row_dot(squared.clamp_(min=0).sqrt_(), top.outside)


def pairwise(x: Tensor) -> Tensor:
    """||x_i - x_j||, (..., K, K) float32: computed in float64, of which rounding leaves seven digits."""
    x = x.double()
    squared = x.square().sum(-1)
    gram = x @ x.transpose(-1, -2)
    return (squared[..., None] + squared[..., None, :]).sub_(gram, alpha=2).clamp_(min=0).sqrt_().float()


def widest_pairs(pairs_KxK: Tensor, ranked: Tensor, tops: Sequence[TopN]) -> list[Tensor]:
    """d1 for every set of rising size: the largest ||x_i - x_j|| over i outside and j inside, (..., Q).

    Args:
        pairs_KxK: (..., K, K), of :func:`pairwise`.
        ranked: (..., Q, K) of rank_keys, or its first keys.
        tops: by rising N.
    """
    n_keys = pairs_KxK.shape[-1]
    flat = pairs_KxK.reshape(-1, n_keys)
    first_row = torch.arange(0, len(flat), n_keys, device=flat.device).view(*pairs_KxK.shape[:-2], 1)
    farthest = torch.zeros(tops[0].outside.shape, dtype=flat.dtype, device=flat.device)
    found, done = [], 0
    for top in tops:
        for rank in range(done, top.size):
            of_key = flat.index_select(0, (ranked[..., rank] + first_row).flatten()).view_as(farthest)
            torch.maximum(farthest, of_key, out=farthest)
        done = top.size
        found.append((farthest * top.outside).amax(-1).double())
    return found


def expectations(of: Terms, top: TopN) -> dict[str, Tensor]:
    """E d~ for I_N uniform over all N-subsets of the visible keys: what is provable, and two readings of the paper.

    ``expected_distance_lower`` is also the published main sum. ``expected_distance_no_factor`` leaves out the inclusion
    factor c = N/(n - 1): m_i = y_i - sum of the others. ``expected_distance_limit`` is what Corollary 2 says E d~ tends
    to. (..., Q), NaN where the row sees no more than N keys.
    """
    n, size, S = top.n, float(top.size), of.sum_squared
    c = size / (n - 1)
    # ||m_i||^2 and V_i are linear in ||y_i||^2 and y_i . Y: the two sums differ in coefficients only.
    a, b, constant = (1 + c).square(), -2 * c * (1 + c), c.square() * S
    spread = size * (n - 1 - size) / ((n - 1) * (n - 2)).masked_fill(n < 3, torch.nan)
    mean_norms = of.root_sum(a, b, constant)
    spread_norms = of.root_sum(
        a - spread * (1 + 1 / (n - 1)),
        b + 2 * spread / (n - 1),
        constant + spread * (of.y_squared.sum(-1) - S / (n - 1)),
    )
    pair = expected_distance(n, top.size, mean_norms=mean_norms, spread_norms=spread_norms, total_norm=of.norm_sum)
    limit = limit_distance(pair.provable, of.norm_sum)
    values = {
        "expected_distance_lower": pair.provable.lower,
        "expected_distance_upper": pair.provable.upper,
        "expected_distance_no_factor": (n - size) / n * of.no_factor_sum,
        "expected_distance_limit": limit.published.lower,
    }
    return {name: top.where_valid(value) for name, value in values.items()}  # type: ignore[arg-type]
