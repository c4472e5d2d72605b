"""How many of the N largest keys a head tells apart from the rest, and how its values lie."""

from __future__ import annotations

import torch
from torch import Tensor

from .distance import Terms
from .topn import TopN


def separability(of: Terms, top: TopN) -> dict[str, Tensor]:
    """N_s/N and r, (..., Q), NaN where the row sees no more than N keys: without an outsider there is no ratio, not 1.

    r = min over j outside I_N of ||s - a_j x_j||, and N_s counts the i in I_N with ||a_i x_i - s|| < r, strictly.

    Args:
        of: weights and representations of unit length (:func:`unit`).
        top: the N largest of every row.
    """
    s = of.selected_sum(top)
    # ||s||^2 is common to all and left out: it changes no comparison.
    squared = (s @ of.x.transpose(-1, -2)).mul_(of.weights).mul_(-2).add_(of.y_squared)
    inside = top.take(squared)
    nearest = squared.masked_fill_(top.outside == 0, torch.inf).amin(-1)
    ratio = (inside < nearest[..., None]).double().mean(-1)
    r = (nearest + s.square().sum(-1)).clamp(min=0).sqrt()
    return {"separability": top.where_valid(ratio), "nearest_outsider": top.where_valid(r)}


def anisotropy(x: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Of the keys that a row sees, (..., Q): the mean cosine of their pairs, and their spread about their mean.

    Args:
        x: (..., K, D), representations of the keys.
        mask: (..., Q, K) bool, True = visible.
    """
    visible = mask.double()
    n = visible.sum(-1)
    u, x = unit(x), x.double()
    unit_squared = (visible @ u.square().sum(-1)[..., None])[..., 0]
    pairs = (visible @ u).square().sum(-1) - unit_squared
    mean_square = (visible @ x.square().sum(-1)[..., None])[..., 0] / n
    centre = (visible @ x) / n[..., None]
    return {
        "anisotropy": pairs / (n * (n - 1)).masked_fill(n < 2, torch.nan),
        "spread": (mean_square - centre.square().sum(-1)).clamp(min=0).sqrt(),
    }


def unit(x: Tensor) -> Tensor:
    """x over its length, in float64; zero where x is zero."""
    x = x.double()
    norm = x.norm(dim=-1, keepdim=True)
    return x / norm.masked_fill(norm == 0, 1.0)
