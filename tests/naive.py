"""The metrics of one row straight from their definitions: loops, float64, no shared work."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor


def selected(a: Sequence[float], visible: Sequence[int], size: int) -> list[int]:
    """I_N: by falling weight, ties to the earlier key."""
    return sorted(visible, key=lambda i: (-a[i], i))[:size]


def row_sum_of(a: Sequence[float], x: Tensor, keys: Sequence[int]) -> Tensor:
    return sum((a[i] * x[i] for i in keys), torch.zeros(x.shape[1], dtype=torch.float64))


def distance(a: Sequence[float], x: Tensor, visible: Sequence[int], chosen: Sequence[int]) -> float:
    s = row_sum_of(a, x, chosen)
    return sum((a[i] * x[i] - s).norm().item() for i in visible if i not in chosen)


def expected_distance(a: Sequence[float], x: Tensor, visible: Sequence[int], size: int) -> float:
    """Over all N-subsets, by enumeration."""
    subsets = list(itertools.combinations(visible, size))
    return sum(distance(a, x, visible, subset) for subset in subsets) / len(subsets)


def published_bound(a: Sequence[float], x: Tensor, visible: Sequence[int], chosen: Sequence[int]) -> float:
    outside = [i for i in visible if i not in chosen]
    abar = sum(a[i] for i in chosen)
    d1 = max((x[i] - x[j]).norm().item() for i in outside for j in chosen)
    return (1 - abar) * d1 + max(x[j].norm().item() for j in chosen) * (len(outside) * abar - (1 - abar))


def separability(a: Sequence[float], x: Tensor, visible: Sequence[int], size: int) -> float:
    unit = [v / v.norm() if v.norm() > 0 else v for v in x]
    chosen = selected(a, visible, size)
    s = row_sum_of(a, torch.stack(unit), chosen)
    nearest = min((s - a[j] * unit[j]).norm().item() for j in visible if j not in chosen)
    return sum((a[i] * unit[i] - s).norm().item() < nearest for i in chosen) / size


def anisotropy(x: Tensor, visible: Sequence[int]) -> float:
    pairs = list(itertools.combinations(visible, 2))
    return sum(torch.cosine_similarity(x[i], x[j], dim=0).item() for i, j in pairs) / len(pairs)


def entropy(a: Sequence[float], visible: Sequence[int]) -> float:
    total = sum(abs(a[i]) for i in visible)
    shares = [abs(a[i]) / total for i in visible]
    return -sum(p * math.log(p) for p in shares if p > 0) / math.log(len(visible))
