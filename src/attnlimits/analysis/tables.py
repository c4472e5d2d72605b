"""From rows to the tidy tables of the experiments, and from passages to curves with a band.

One schema for every experiment, a number a row:

==============  ====================================================================================================
experiment      one of settings.EXPERIMENTS
passage, layer, head
L               context length; N, T, eps: what else the number was taken at, empty where it does not depend on it
quantity        as docs/analysis.md lists them
value           mean over the rows that count
rows            that count: those that see more than N keys, of the first L (vanishing: of rows L/2 .. L)
rows_left_out   the others
==============  ====================================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
import torch
from scipy.stats import ks_2samp
from torch import Tensor

from .rows import Key, Rows
from .settings import Settings

AT = ("L", "N", "T", "eps")
COLUMNS = ("experiment", "passage", "layer", "head", *AT, "quantity", "value", "rows", "rows_left_out")
RESAMPLES = 1000
TRUE = "distance"
COMPARATORS = ("expected_distance_lower", "expected_distance_upper", "expected_distance_no_factor")
DISTANCES = (TRUE, "selected_norm", "distance_lower", "distance_upper", "distance_published", *COMPARATORS)
SEPARABILITIES = (
    *("separability", "nearest_outsider", "separability_published_lower", "separability_published_upper"),
    *("separability_lower", "separability_upper", "separability_sure"),
)
WITHOUT_N = ("anisotropy", "first_key_mass")  # shown beside separability
VANISHING = (
    *("max_weight", "max_weight_times_n", "entropy", "effective_keys", "top_mass", "first_key_mass", "zeros"),
    *("max_weight_published", "max_weight_upper", "min_weight", "min_weight_published", "min_weight_lower"),
)


Part = tuple[Key, int, Tensor, Tensor, int]  # key, L, means (H,), rows that count (H,), rows in question


def layer_table(rows: Rows, settings: Settings, *, passage: int, layer: int) -> pd.DataFrame:
    """The tidy table of one passage and layer."""
    named = [(name, *part) for name in settings.experiments for part in _MEANS[name](rows, settings)]
    experiments, keys, lengths, means, counts, asked = zip(*named, strict=True)
    n_heads = len(means[0])
    rows_counted = torch.cat(counts).numpy()
    columns = {
        "experiment": np.repeat(np.array(experiments, dtype=object), n_heads),
        "passage": passage,
        "layer": layer,
        "head": np.tile(np.arange(n_heads), len(named)),
        "L": np.repeat(lengths, n_heads),
        "N": pd.array(np.repeat([key.N for key in keys], n_heads), dtype="Int64"),
        "T": np.repeat(np.array([key.T for key in keys], dtype=float), n_heads),
        "eps": np.repeat(np.array([key.eps for key in keys], dtype=float), n_heads),
        "quantity": np.repeat(np.array([key.quantity for key in keys], dtype=object), n_heads),
        "value": torch.cat(means).numpy(),
        "rows": rows_counted,
        "rows_left_out": np.repeat(asked, n_heads) - rows_counted,
    }
    return pd.DataFrame(columns)[list(COLUMNS)]


def _mean(rows: Tensor, first: int, last: int) -> tuple[Tensor, Tensor, int]:
    part = rows[:, first:last]
    return part.nanmean(-1), (~part.isnan()).sum(-1), part.shape[-1]


def _parts(rows: Rows, keys: Sequence[Key], lengths: Sequence[int]) -> Iterator[Part]:
    for key in keys:
        for L in lengths:
            if key in rows and (key.N is None or key.N < L):
                yield key, L, *_mean(rows[key], 0, L)


def _length(rows: Rows) -> int:
    return next(iter(rows.values())).shape[-1]


def _distance_vs_length(rows: Rows, settings: Settings) -> Iterator[Part]:
    keys = [Key(name, N=settings.length_n) for name in DISTANCES]
    yield from _parts(rows, keys, settings.lengths_within(_length(rows)))


def _distance_vs_topn(rows: Rows, settings: Settings) -> Iterator[Part]:
    keys = [Key(name, N=N) for N in settings.top_n for name in DISTANCES]
    yield from _parts(rows, keys, [_length(rows)])


def _critical_topn(rows: Rows, settings: Settings) -> Iterator[Part]:
    keys = [Key(name, N=N) for N in settings.critical_n for name in (TRUE, *COMPARATORS)]
    yield from _parts(rows, keys, settings.lengths_within(_length(rows)))


def _separability(rows: Rows, settings: Settings) -> Iterator[Part]:
    keys = [Key(name, N=N) for N in settings.separability_n for name in SEPARABILITIES]
    yield from _parts(rows, [*keys, *map(Key, WITHOUT_N)], [_length(rows)])


def _gradient_sensitivity(rows: Rows, settings: Settings) -> Iterator[Part]:
    keys = [Key("sensitivity", T=T, eps=eps) for T in settings.temperatures for eps in settings.steps]
    yield from _parts(rows, [*keys, Key("jacobian_norm")], [_length(rows)])


def _vanishing(rows: Rows, settings: Settings) -> Iterator[Part]:
    """At L stand the rows that see more than L/2 keys and at most L."""
    for L in settings.lengths_within(_length(rows)):
        for name in VANISHING:
            if Key(name) in rows:
                yield Key(name), L, *_mean(rows[Key(name)], L // 2, L)


_MEANS = {
    "distance_vs_length": _distance_vs_length,
    "distance_vs_topn": _distance_vs_topn,
    "critical_topn": _critical_topn,
    "separability": _separability,
    "gradient_sensitivity": _gradient_sensitivity,
    "vanishing": _vanishing,
}


def curves(table: pd.DataFrame, *, seed: int) -> pd.DataFrame:
    """Over heads the mean, of ``sensitivity`` the maximum; over passages the mean of those, and a 95 % bootstrap band.

    ``low`` and ``high`` are empty where there is a single passage: nothing can be resampled.
    """
    by = ["experiment", *AT, "quantity"]
    sensitivity = table["quantity"] == "sensitivity"
    over_heads = pd.concat(
        [
            _over_heads(table[~sensitivity], by, "mean"),
            _over_heads(table[sensitivity], by, "max"),
        ]
    )
    generator = np.random.default_rng(seed)
    records = []
    for at, group in over_heads.groupby(by, dropna=False, sort=True):
        values = group["value"].to_numpy()
        low, high = _band(values, generator)
        counts = {"rows": group["rows"].sum(), "rows_left_out": group["rows_left_out"].sum()}
        records.append(dict(zip(by, at, strict=True)) | {"value": values.mean(), "low": low, "high": high} | counts)
    return pd.DataFrame(records).astype({"N": "Int64"})


def _over_heads(table: pd.DataFrame, by: list[str], how: str) -> pd.DataFrame:
    grouped = table.groupby([*by, "passage"], dropna=False)
    return grouped.agg(value=("value", how), rows=("rows", "sum"), rows_left_out=("rows_left_out", "sum")).reset_index()


def _band(values: np.ndarray, generator: np.random.Generator) -> tuple[float, float]:
    if len(values) < 2 or not np.isfinite(values).all():  # a bound may overflow
        return np.nan, np.nan
    resampled = generator.choice(values, (RESAMPLES, len(values))).mean(-1)
    return float(np.quantile(resampled, 0.025)), float(np.quantile(resampled, 0.975))


def heads_at(table: pd.DataFrame, experiment: str) -> pd.DataFrame:
    """The experiment's table with passages averaged: a row a layer, head, place and quantity."""
    part = table[table["experiment"] == experiment]
    by = ["layer", "head", *AT, "quantity"]
    return part.groupby(by, dropna=False)["value"].mean().reset_index()


def critical(table: pd.DataFrame, settings: Settings) -> pd.DataFrame:
    """Kolmogorov-Smirnov tests of true against expected distances over heads, at every L and N.

    ``critical_n`` of a comparator and L is the first N that is not rejected, empty where all are. Passages are averaged
    per head first (passage empty), and each is tested alone for the band.
    """
    part = table[table["experiment"] == "critical_topn"]
    pooled = heads_at(table, "critical_topn").assign(passage=pd.NA)
    tested = pd.concat([pooled, part[pooled.columns]])
    records = []
    for (passage, L, N), group in tested.groupby(["passage", "L", "N"], dropna=False):
        by_name = {name: rows["value"].to_numpy() for name, rows in group.groupby("quantity")}
        for name in COMPARATORS:
            test = ks_2samp(by_name[TRUE], by_name[name])
            record = {"passage": passage, "L": L, "N": N, "comparator": name}
            records.append(
                record | {"statistic": test.statistic, "p": test.pvalue, "rejected": test.pvalue < settings.ks_level}
            )
    tests = pd.DataFrame(records).astype({"passage": "Int64", "N": "Int64"})
    first = tests[~tests["rejected"]].groupby(["passage", "L", "comparator"], dropna=False)["N"].min()
    return tests.merge(first.rename("critical_n").reset_index(), "left", ["passage", "L", "comparator"])
