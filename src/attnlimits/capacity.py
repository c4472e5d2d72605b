"""What a layer's heads can do, head by head: every metric of metrics/ on one view of the probe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .metrics import jacobian
from .metrics.distance import distance, expectations, pairwise, terms, widest_pairs
from .metrics.separability import anisotropy, separability, unit
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
    of, of_unit = terms(weights, x, mask), terms(weights, unit(x), mask)
    rows = vanishing(of.weights, mask, top_k=settings.top_k) | anisotropy(x, mask)
    ranked = rank_keys(weights, mask)
    tops = [top_n(ranked, of.visible, size) for size in settings.top_n if size < weights.shape[-1]]
    widest = widest_pairs(pairwise(x), ranked, tops) if tops else []
    for top, d1 in zip(tops, widest, strict=True):
        if not sums_to_one:  # then the published bound does not apply
            d1 = torch.full_like(d1, torch.nan)
        by_name = distance(of, top, widest=d1) | expectations(of, top)
        by_name["distance_slack"] = by_name["distance_upper"] - by_name["distance"]
        by_name["distance_published_slack"] = by_name["distance_published"] - by_name["distance"]
        by_name["separability"] = separability(of_unit, top)["separability"]
        del by_name["expected_distance_limit"]
        rows |= {f"{name}_n{top.size}": value for name, value in by_name.items()}
    return rows


def spectral_norm(normalizer: Normalizer, logits: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """Spectral norm of d weights / d logits of every row, (B, H, R) float64, the 1/T included.

    In closed form where the normalizer declares one, else by power iteration on :func:`iterated_rows` alone, and then
    (B, H, fewer).
    """
    form = normalizer.jacobian_form(weights.double(), mask)
    if form is not None:
        norm = jacobian.diagonal_minus_rank_one(form.u, form.total)
        return (norm * form.factor).abs() / normalizer.T
    rows = iterated_rows(logits.shape[-2]).to(logits.device)
    logits, mask = (tensor.index_select(-2, rows) for tensor in (logits, mask))
    return jacobian.by_power_iteration(lambda z: normalizer(z, mask), logits)


def iterated_rows(n_rows: int) -> Tensor:
    """At most ITERATED_ROWS of so many rows, evenly spread, the last among them."""
    return torch.arange(n_rows - 1, -1, n_rows // -ITERATED_ROWS).flip(0)


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
