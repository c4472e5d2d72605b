"""Which statements of the paper hold on these rows: each bound held against each row, and a verdict by fixed rules.

docs/analysis.md states the rules of :func:`claims`; tests fix them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from .. import bounds
from ..normalizers import Normalizer
from .rows import Key, Rows, row_factor
from .settings import Settings
from .tables import TRUE

TOLERANCE = 1e-9  # relative: what float64 may round; a value this little beyond a bound does not violate it
RESOLUTION = 1e-7  # of distances, which are roots of differences of squares
AUDIT_COLUMNS = (
    *("passage", "layer", "head", "statement", "version", "side", "N", "T", "eps"),
    *("rows", "violated", "vacuous", "slack", "ratio"),
)


@dataclass(frozen=True)
class Check:
    """One side of one statement against the rows: value <= bound, or >=.

    Attributes:
        vacuous: (H, L) bool, where the bound says nothing.
        tolerance: relative to ``scale``.
        scale: of the terms whose difference value and bound are; None = the bound's own.
    """

    statement: str
    version: str  # "published" or "provable"
    side: str  # "upper" or "lower"
    at: Key
    value: Tensor
    bound: Tensor
    vacuous: Tensor | None = None
    tolerance: float = TOLERANCE
    scale: Tensor | None = None


def refusal(statement: str, version: str, normalizer: Normalizer) -> str | None:
    """Why a statement does not apply to a normalizer, or None where it does."""
    if statement in ("corollary_1", "corollary_3", "sensitivity") and not normalizer.rescales_rows:
        return f"{normalizer.name} is not softmax of rescaled rows: its weights are not exp(z_i) over a sum of such"
    # What is provable of Theorem 1 holds for weights of any sum and sign.
    if (statement, version) == ("theorem_1_fixed", "published") and normalizer.properties.row_sum != "one":
        return f"rows of {normalizer.name} need not sum to 1, and the bound takes 1 - abar for the rest"
    return None


def audit_rows(rows: Rows, normalizer: Normalizer, settings: Settings, *, passage: int, layer: int) -> pd.DataFrame:
    """A row a head and check: how many rows count, violate and are vacuous, and the median slack and ratio."""
    counts = [_count(check) for check in _checks(rows, normalizer, settings)]
    if not counts:
        return pd.DataFrame(columns=AUDIT_COLUMNS)
    columns = {name: np.concatenate([count[name] for count in counts]) for name in counts[0]}
    table = pd.DataFrame({"passage": passage, "layer": layer} | columns)
    return table[list(AUDIT_COLUMNS)].astype({"N": "Int64", "T": "float64", "eps": "float64"})


def _checks(rows: Rows, normalizer: Normalizer, settings: Settings) -> Iterator[Check]:
    for N in settings.bounded_sizes():
        if Key(TRUE, N=N) in rows:
            yield from _distance_checks(rows, normalizer, N)
    if settings.runs("separability"):
        for N in settings.separability_n:
            if Key("separability", N=N) in rows:
                yield from _separability_checks(rows, N)
    if normalizer.rescales_rows:
        if settings.runs("vanishing"):
            yield from _weight_checks(rows)
        if settings.runs("gradient_sensitivity", "vanishing"):
            yield from _jacobian_checks(rows, normalizer)
        if settings.runs("gradient_sensitivity"):
            yield from _sensitivity_checks(rows, normalizer, settings)


def _distance_checks(rows: Rows, normalizer: Normalizer, N: int) -> Iterator[Check]:
    def of(name: str) -> Tensor:
        return rows[Key(name, N=N)]

    at, d = Key(TRUE, N=N), of(TRUE)
    rounding: dict[str, Any] = {"tolerance": RESOLUTION, "scale": of("distance_upper")}
    if refusal("theorem_1_fixed", "published", normalizer) is None:
        yield Check("theorem_1_fixed", "published", "upper", at, d, of("distance_published"), **rounding)
    yield Check("theorem_1_fixed", "provable", "upper", at, d, of("distance_upper"), **rounding)
    yield Check("theorem_1_fixed", "provable", "lower", at, d, of("distance_lower"), **rounding)
    rounding["scale"] = of("expected_distance_upper")
    limit, lower, upper = of("expected_distance_limit"), of("expected_distance_lower"), of("expected_distance_upper")
    # E d~ itself is not known, only between which two numbers it lies: a claimed value outside of them is refuted.
    yield Check("theorem_1_random", "published", "upper", at, lower, upper, **rounding)
    yield Check("corollary_2", "published", "lower", at, limit, lower, **rounding)
    yield Check("corollary_2", "published", "upper", at, limit, upper, **rounding)


def _separability_checks(rows: Rows, N: int) -> Iterator[Check]:
    at, ratio = Key("separability", N=N), rows[Key("separability", N=N)]
    for version, name in (("published", "separability_published"), ("provable", "separability")):
        lower, upper = rows[Key(f"{name}_lower", N=N)], rows[Key(f"{name}_upper", N=N)]
        yield Check("theorem_2", version, "lower", at, ratio, lower, vacuous=lower <= 0)
        yield Check("theorem_2", version, "upper", at, ratio, upper, vacuous=upper >= 1)
    sure = rows[Key("separability_sure", N=N)]
    yield Check("theorem_2_sure", "provable", "lower", at, ratio, sure, vacuous=sure <= 0)


def _weight_checks(rows: Rows) -> Iterator[Check]:
    at, largest, smallest = Key("max_weight"), rows[Key("max_weight")], rows[Key("min_weight")]
    for version, upper, lower in (
        ("published", rows[Key("max_weight_published")], rows[Key("min_weight_published")]),
        ("provable", rows[Key("max_weight_upper")], rows[Key("min_weight_lower")]),
    ):
        # From 1 - 1e-6 on an upper bound says nothing that a row sum of 1 does not.
        yield Check("corollary_1", version, "upper", at, largest, upper, vacuous=upper >= 1 - 1e-6)
        yield Check("corollary_1", version, "lower", Key("min_weight"), smallest, lower, vacuous=lower <= 1e-12)


def _effective_T(rows_HxL: Tensor, normalizer: Normalizer, T: float) -> Tensor:
    """T over the factor of a length-aware softmax, (1 or H, L)."""
    return T / row_factor(normalizer, torch.arange(1, rows_HxL.shape[-1] + 1)).cpu()


def _jacobian_checks(rows: Rows, normalizer: Normalizer) -> Iterator[Check]:
    at, norm = Key("jacobian_norm"), rows[Key("jacobian_norm")]
    pair = bounds.softmax_jacobian(_effective_T(norm, normalizer, normalizer.T))
    for version, upper in (("published", pair.published.upper), ("provable", pair.provable.upper)):
        assert upper is not None
        yield Check("corollary_3", version, "upper", at, norm, upper.expand_as(norm))


def _sensitivity_checks(rows: Rows, normalizer: Normalizer, settings: Settings) -> Iterator[Check]:
    for T in settings.temperatures:
        for eps in settings.steps:
            at = Key("sensitivity", T=T, eps=eps)
            g = rows[at]
            pair = bounds.softmax_sensitivity(_effective_T(g, normalizer, T), eps)
            for version, upper in (("published", pair.published.upper), ("provable", pair.provable.upper)):
                assert upper is not None
                # The difference of two weights keeps no more than this of a small step.
                yield Check("sensitivity", version, "upper", at, g, upper.expand_as(g), tolerance=RESOLUTION)


def _count(check: Check) -> dict[str, np.ndarray]:
    """A value a head. Only rows where value and bound are defined count; an infinite bound is never violated."""
    defined = ~(check.value.isnan() | check.bound.isnan())
    slack = check.bound - check.value if check.side == "upper" else check.value - check.bound
    scale = check.bound if check.scale is None else check.scale
    violated = (slack < -check.tolerance * scale.abs().clamp(min=1e-12)) & defined
    vacuous = torch.zeros_like(defined) if check.vacuous is None else check.vacuous & defined
    n_heads, at = len(slack), check.at
    same: dict[str, Any] = {"statement": check.statement, "version": check.version, "side": check.side}
    same |= {name: np.nan if place is None else place for name, place in (("N", at.N), ("T", at.T), ("eps", at.eps))}
    counts = {"rows": defined.sum(-1), "violated": violated.sum(-1), "vacuous": vacuous.sum(-1)}
    medians = {"slack": slack, "ratio": check.bound / check.value}
    counts |= {name: each.masked_fill(~defined, torch.nan).nanmedian(-1).values for name, each in medians.items()}
    columns = {name: np.full(n_heads, value) for name, value in same.items()}
    return {"head": np.arange(n_heads)} | columns | {name: each.numpy() for name, each in counts.items()}


def audit(by_head: pd.DataFrame) -> pd.DataFrame:
    """Over heads and passages, a row a statement, version, side and place.

    ``rows_violated`` and ``rows_vacuous`` are shares of rows, ``heads_violated`` the share of heads with one such row
    or more; ``slack`` (bound - value, of a lower bound value - bound) and ``ratio`` (bound / value) are medians over
    heads of the heads' medians over rows.
    """
    records = []
    by = ["statement", "version", "side", "N", "T", "eps"]
    for at, group in by_head.groupby(by, dropna=False, sort=False):
        n = group["rows"].sum()
        heads = group.groupby(["layer", "head"])["violated"].sum()
        record = dict(zip(by, at, strict=True)) | {"rows": n, "heads": len(heads)}
        record |= {"rows_violated": group["violated"].sum() / n if n else np.nan}
        record |= {"heads_violated": (heads > 0).mean(), "rows_vacuous": group["vacuous"].sum() / n if n else np.nan}
        records.append(record | {"slack": group["slack"].median(), "ratio": group["ratio"].median()})
    shares = ("rows_violated", "heads_violated", "rows_vacuous", "slack", "ratio")
    return pd.DataFrame(records, columns=[*by, "rows", "heads", *shares]).astype({"N": "Int64"})
