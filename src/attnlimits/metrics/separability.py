"""How many of the N largest keys a head tells apart from the rest, and how its values lie."""

from __future__ import annotations

import torch
from torch import Tensor

from .topn import TopN


def separability(weights: Tensor, x: Tensor, top: TopN) -> Tensor:
    """N_s/N, (..., Q): the share of I_N that lies nearer to the selected sum s than the nearest outsider does.

    Representations are scaled to unit length first (a zero vector stays zero). i in I_N counts if
    ||a_i x_i - s|| < min over j outside I_N of ||s - a_j x_j||, strictly. NaN where the row sees no more than N keys:
    without an outsider the ratio is undefined, not 1.

    Args:
        weights: (..., Q, K), 0 at masked keys.
        x: (..., K, D), representations of the keys.
        top: the N largest of every row.
    """
    a, x = weights.double(), unit(x)
    s = (a * top.inside) @ x
    # ||s||^2 is common to all and left out: it changes no comparison.
    squared = (a * x.norm(dim=-1)[..., None, :]).square() - 2 * a * (s @ x.transpose(-1, -2))
    nearest_outsider = squared.masked_fill(~top.outside, torch.inf).amin(-1, keepdim=True)
    separated = (squared < nearest_outsider) & top.inside
    return (separated.sum(-1) / top.size).double().masked_fill(~top.valid, torch.nan)


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
