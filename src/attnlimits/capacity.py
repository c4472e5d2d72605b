"""What a layer's heads can do, head by head: every metric of metrics/ on one view of the probe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .metrics import jacobian
from .metrics.distance import distance, terms
from .metrics.separability import anisotropy, separability
from .metrics.topn import rank_keys, top_n
from .metrics.vanishing import log_slope, vanishing
from .metrics.verdict import Thresholds, verdict
from .normalizers import Normalizer
from .probe import LayerView

ITERATED_ROWS = 16  # of a normalizer whose Jacobian has no closed form


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        top_n: the N of distances and separability; the verdict takes the largest that any row can hold.
        top_k: keys of ``top_mass``.
        thresholds: of the verdict.
    """

    top_n: Sequence[int] = (5, 20)
    top_k: int = 10
    thresholds: Thresholds = field(default_factory=Thresholds)


def measure_layer(view: LayerView, settings: Settings) -> dict[str, Tensor]:
    """Every metric of the layer's heads, (H,) float64: means over blocks and rows, rows left out where undefined."""
    weights, x = view.weights_BxHxRxK, view.values_BxHxKxD
    mask = view.mask.expand_as(weights)
    sums_to_one = view.normalizer.properties.row_sum == "one"
    # Head by head: the float64 temporaries of one find place in a core's cache.
    heads_of = (tensor.split(1, dim=1) for tensor in (weights, x, mask))
    by_head = [_measure_rows(a, v, m, settings, sums_to_one) for a, v, m in zip(*heads_of, strict=True)]
    rows = {name: torch.cat([head[name] for head in by_head], dim=1) for name in by_head[0]}
    norm = spectral_norm(view.normalizer, view.logits_BxHxRxK, weights, mask)
    heads = {name: value.nanmean(dim=(0, -1)) for name, value in rows.items()} | _jacobian(norm, view.normalizer.T)
    slope, error = log_slope(rows["max_weight"].mean(0), mask[0].sum(-1))
    return heads | {"max_weight_slope": slope, "max_weight_slope_error": error} | _verdict(heads, slope, settings)


def _measure_rows(weights: Tensor, x: Tensor, mask: Tensor, settings: Settings, sums_to_one: bool) -> dict[str, Tensor]:
    ranked = rank_keys(weights, mask)
    weights = weights.double()  # once, for all that follow
    shared = terms(weights, x)
    rows = vanishing(weights, mask, top_k=settings.top_k) | anisotropy(x, mask)
    for size in settings.top_n:
        if size < weights.shape[-1]:
            top = top_n(ranked, mask, size)
            by_name = distance(weights, x, top, sums_to_one=sums_to_one, of=shared)
            by_name["separability"] = separability(weights, x, top)
            rows |= {f"{name}_n{size}": value for name, value in by_name.items()}
    return rows


def spectral_norm(normalizer: Normalizer, logits: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """Spectral norm of d weights / d logits of every row, (B, H, R) float64, the 1/T included.

    In closed form where the normalizer declares one, else by power iteration on at most ITERATED_ROWS rows, evenly
    spread, and then (B, H, fewer).
    """
    form = normalizer.jacobian_form(weights.double(), mask)
    if form is not None:
        norm = jacobian.diagonal_minus_rank_one(form.u, form.total)
        return (norm * form.factor).abs() / normalizer.T
    step = -(-logits.shape[-2] // ITERATED_ROWS)
    logits, mask = (tensor.flip(-2)[..., ::step, :] for tensor in (logits, mask))  # the last row among them
    return jacobian.by_power_iteration(lambda z: normalizer(z, mask), logits)


def _jacobian(norm: Tensor, T: float) -> dict[str, Tensor]:
    """A rounding's worth above the published bound is not counted as above it."""
    return {
        "jacobian_norm": norm.mean(dim=(0, -1)),
        "jacobian_norm_max": norm.amax(dim=(0, -1)),
        "jacobian_vs_provable": 2 * T * norm.mean(dim=(0, -1)),
        "jacobian_vs_published": 4 * T * norm.mean(dim=(0, -1)),
        "jacobian_above_published": (norm > (1 + 1e-9) / (4 * T)).double().mean(dim=(0, -1)),
    }


def _verdict(heads: dict[str, Tensor], slope: Tensor, settings: Settings) -> dict[str, Tensor]:
    measured = [heads[name] for size in settings.top_n if (name := f"separability_n{size}") in heads]
    separable = measured[-1] if measured else torch.full_like(slope, torch.nan)
    found = verdict(slope, heads["entropy"], separable, heads["jacobian_norm"], settings.thresholds)
    return {"verdict": found.double()}
