"""Every quantity of analyze.py for one row, straight from its definition: loops, float64, no shared work."""

from __future__ import annotations

import math

import naive
import numpy as np
import torch
from torch import Tensor


def distances(a: list[float], x: Tensor, size: int) -> dict[str, float]:
    n = len(a)
    chosen = naive.selected(a, range(n), size)
    outside = [i for i in range(n) if i not in chosen]
    s = naive.row_sum_of(a, x, chosen).norm().item()
    width = sum(a[i] for i in outside) * max(x[i].norm().item() for i in outside)
    y = [a[i] * x[i] for i in range(n)]
    total, c = sum(y[1:], y[0]), size / (n - 1)
    lower = upper = without = 0.0
    for i in range(n):
        mean = (1 + c) * y[i] - c * total
        lower += mean.norm().item()
        without += (2 * y[i] - total).norm().item()
        if n > 2:
            factor = size * (n - 1 - size) / ((n - 1) * (n - 2))
            others = sum(y[j].square().sum().item() for j in range(n) if j != i)
            variance = factor * (others - (total - y[i]).square().sum().item() / (n - 1))
            upper += math.sqrt(max(mean.square().sum().item() + variance, 0.0))
    crude = (1 + size) * sum(v.norm().item() for v in y)
    share = (n - size) / n
    return {
        "distance": naive.distance(a, x, range(n), chosen),
        "selected_norm": s,
        "distance_lower": max(0.0, (n - size) * s - width),
        "distance_upper": (n - size) * s + width,
        "distance_published": naive.published_bound(a, x, range(n), chosen),
        "expected_distance_lower": share * lower,
        "expected_distance_upper": share * (min(upper, crude) if n > 2 else crude),
        "expected_distance_no_factor": share * without,
    }


def separabilities(a: list[float], x: Tensor, size: int) -> dict[str, float]:
    n, dimension = len(a), x.shape[1]
    u = torch.stack([v / v.norm() if v.norm() > 0 else v for v in x])
    chosen = naive.selected(a, range(n), size)
    s = naive.row_sum_of(a, u, chosen)
    r = min((s - a[j] * u[j]).norm().item() for j in range(n) if j not in chosen)
    delta = min((u[i] - u[j]).norm().item() for i in range(n) for j in range(i))
    sums = dict.fromkeys(("low", "high", "lower", "upper", "sure"), 0.0)
    for i in chosen:
        others = [a[j] for j in chosen if j != i]
        q = sum(w**2 for w in others)
        products = sum(others[j] * others[k] for j in range(len(others)) for k in range(len(others)) if j != k)
        xi = math.sqrt(max(q + (1 - delta**2 / 2) * products, 0.0))
        sums["low"] += 1 - xi / r
        sums["high"] += math.exp(-(max(xi - r, 0.0) ** 2) / 2)
        sums["sure"] += r > xi
        sigma = math.sqrt(q)
        inner = sigma / math.sqrt(1 + 2 / dimension)
        gap, excess = max(inner - r, 0.0), max(r - sigma, 0.0)
        rate = (dimension - 1) / (2 * q) if q > 0 else math.inf
        concentrated = 1 - math.exp(-rate * excess**2) if excess > 0 else 0.0
        sums["lower"] += max(0.0, 1 - sigma / r, concentrated)
        sums["upper"] += math.exp(-rate * gap**2) if gap > 0 else 1.0
    share = {key: value / size for key, value in sums.items()}
    return {
        "separability": naive.separability(a, x, range(n), size),
        "nearest_outsider": r,
        "separability_published_lower": share["low"],
        "separability_published_upper": share["high"],
        "separability_lower": share["lower"],
        "separability_upper": share["upper"],
        "separability_sure": share["sure"],
    }


def shares(a: list[float]) -> dict[str, float]:
    n = len(a)
    return {
        "max_weight": max(a),
        "max_weight_times_n": n * max(a),
        "entropy": naive.entropy(a, range(n)) if n > 1 else math.nan,
        "effective_keys": 1 / sum(w**2 for w in a),
        "top_mass": sum(sorted(a, reverse=True)[:10]),
        "first_key_mass": a[0],
        "zeros": sum(w == 0 for w in a) / n,
        "min_weight": min(a),
    }


def weight_bounds(q: Tensor, k: Tensor, scaling: float, T: float) -> dict[str, float]:
    n, D = len(k), q.norm().item() * max(key.norm().item() for key in k) * scaling
    ratio = math.exp(2 * D / T)
    return {
        "max_weight_published": ratio / n,
        "max_weight_upper": 1 / (1 + (n - 1) / ratio),
        "min_weight_published": 1 / (ratio * n),
        "min_weight_lower": 1 / (1 + (n - 1) * ratio),
    }


def jacobian_norm(a: list[float], T: float) -> float:
    weights = torch.tensor(a, dtype=torch.float64)
    return torch.linalg.matrix_norm(torch.diag(weights) - torch.outer(weights, weights), 2).item() / T


def sensitivity(z: Tensor, T: float, eps: float, seed: tuple[int, ...]) -> float:
    """z: of the keys that the row sees."""
    v = np.random.default_rng(seed).standard_normal(len(z))
    v = torch.from_numpy(v / np.linalg.norm(v))
    return ((torch.softmax((z + eps * v) / T, -1) - torch.softmax(z / T, -1)).norm() / eps).item()
