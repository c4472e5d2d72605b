"""How a row of attention weights is spread over its keys.

Every function takes weights (..., Q, K) and a bool mask that broadcasts to them, True = visible, and gives float64
values a row, (..., Q). n is the number of visible keys. A share is of |a| / sum |a|, so that it is defined for weights
that do not sum to 1; of a row whose weights are all 0 it is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor


def vanishing(weights: Tensor, mask: Tensor, *, top_k: int = 10) -> dict[str, Tensor]:
    """The values by name; docs/metrics.md says what each is."""
    mask = mask.expand_as(weights)
    n = mask.sum(-1)
    a = weights.double()
    total = a.abs().sum(-1)
    share = a.abs() / total.masked_fill(total == 0, torch.nan)[..., None]
    nats = torch.special.entr(share).sum(-1)
    support = (a != 0).sum(-1).double()
    largest = a.masked_fill(~mask, -torch.inf).amax(-1).masked_fill(n == 0, torch.nan)
    return {
        "max_weight": largest,
        "max_weight_times_n": largest * n,
        "entropy": nats / n.double().log().masked_fill(n < 2, torch.nan),
        "effective_keys": 1 / share.square().sum(-1),
        "effective_keys_entropy": nats.exp(),
        "top_mass": share.topk(min(top_k, share.shape[-1]), dim=-1).values.sum(-1),
        "first_key_mass": share.gather(-1, mask.int().argmax(-1, keepdim=True))[..., 0],
        "support": support,
        "zeros": 1 - support / n.masked_fill(n == 0, 1) + torch.where(n == 0, torch.nan, 0.0),
        "row_sum": a.sum(-1).masked_fill(n == 0, torch.nan),
    }


def log_slope(max_weight: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """Slope of ln max_weight against ln n by least squares, and its standard error.

    -1 is a weight that vanishes as 1/n, 0 one that does not vanish.

    Args:
        max_weight: (..., P), averaged over rows of equal n where there are several.
        n: (P,), their numbers of visible keys. Points of n < 2 or a weight that is not positive are left out.

    Returns:
        (...,) each; NaN with fewer than three points, or where all n are equal.
    """
    used = (max_weight > 0) & (n >= 2)
    weight = used.double()
    count = weight.sum(-1)
    x = n.double().log().expand_as(weight)
    y = torch.where(used, max_weight.double(), 1.0).log()
    x = (x - (weight * x).sum(-1, keepdim=True) / count[..., None]) * weight
    y = (y - (weight * y).sum(-1, keepdim=True) / count[..., None]) * weight
    xx = x.square().sum(-1)
    slope = (x * y).sum(-1) / xx
    residual = ((y - slope[..., None] * x) * weight).square().sum(-1)
    undefined = (count < 3) | (xx == 0)
    error = (residual / (count - 2) / xx).sqrt()
    return slope.masked_fill(undefined, torch.nan), error.masked_fill(undefined, torch.nan)
