"""The paper's claims, what a checkpoint shows of each, and a verdict: by the rules that docs/analysis.md states."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..normalizers import Normalizer
from .audit import refusal
from .settings import Settings
from .tables import TRUE

VACUOUS = 0.9  # share of rows on which a bound says nothing, from which it is called vacuous
LOOSE = 10.0  # median of bound / value from which it is called loose
LINEAR = (0.8, 1.2)  # exponents of L or 1/T that count as proportional
CLOSE = (0.8, 1.25)  # ratios that count as equal
PAPER_CRITICAL = 0.06  # critical N over L; reproduced within a factor of 2
PAPER_PLATEAU = (0.70, 0.85)  # N_s/N for N >= 16
PLATEAU_FROM = 16
VANISHING_SLOPE, STEADY_SLOPE = -0.9, -0.1

LOWER, UPPER, NO_FACTOR = "expected_distance_lower", "expected_distance_upper", "expected_distance_no_factor"


@dataclass(frozen=True)
class Evidence:
    """What the verdicts are decided by."""

    curves: pd.DataFrame
    audit: pd.DataFrame
    critical: pd.DataFrame
    heads: pd.DataFrame
    normalizer: Normalizer
    settings: Settings

    def curve(self, experiment: str, quantity: str, index: str, **at: float) -> pd.Series:
        """The value by L, N or T, where the rest is as ``at`` says."""
        part = self.curves[(self.curves["experiment"] == experiment) & (self.curves["quantity"] == quantity)]
        for name, value in at.items():
            part = part[part[name] == value]
        return part.dropna(subset=["value"]).set_index(index)["value"].sort_index()

    def bound(self, statement: str, version: str, side: str | None = None) -> dict[str, float]:
        """Over all places of a statement: shares of rows and heads, and the median ratio."""
        part = self.audit[(self.audit["statement"] == statement) & (self.audit["version"] == version)]
        if side is not None:
            part = part[part["side"] == side]
        part = part[part["rows"] > 0]
        if part.empty:
            return {}
        shares = {
            name: float(np.average(part[name], weights=part["rows"])) for name in ("rows_violated", "rows_vacuous")
        }
        return shares | {"heads_violated": float(part["heads_violated"].max()), "ratio": float(part["ratio"].median())}


def bound_verdict(found: dict[str, float], side: str | None = None) -> str:
    """Of a bound that applies: violated, vacuous, loose or holds. A lower bound is loose far below the value."""
    if found["rows_violated"] > 0:
        return "violated"
    if found["rows_vacuous"] >= VACUOUS:
        return "vacuous"
    loose = found["ratio"] <= 1 / LOOSE if side == "lower" else found["ratio"] >= LOOSE
    return "holds, loose" if loose else "holds"


def exponent(curve: pd.Series) -> float:
    """b of value ~ x^b by least squares on logarithms; NaN with fewer than three points."""
    curve = curve[curve > 0]
    if len(curve) < 3:
        return math.nan
    return float(np.polyfit(np.log(curve.index.to_numpy(float)), np.log(curve.to_numpy(float)), 1)[0])


def within(value: float, interval: tuple[float, float]) -> bool:
    return interval[0] <= value <= interval[1]


def _reproduced(good: bool) -> str:
    return "reproduced" if good else "not reproduced"


def claims(evidence: Evidence) -> pd.DataFrame:
    """A row a claim: section, claim, what is shown, verdict."""
    records = []
    for section, claim, experiment, judge in CLAIMS:
        if not evidence.settings.runs(*experiment.split()):
            shown, verdict = "its experiment was not run", "not measured"
        else:
            shown, verdict = judge(evidence)
        records.append({"section": section, "claim": claim, "shown": shown, "verdict": verdict})
    return pd.DataFrame(records)


Judged = tuple[str, str]


def _bound_claim(statement: str, version: str, side: str | None = None, note: str = "") -> Callable[[Evidence], Judged]:
    def judge(evidence: Evidence) -> Judged:
        reason = refusal(statement, version, evidence.normalizer)
        found = evidence.bound(statement, version, side)
        if reason is not None or not found:
            return reason or "no row on which it is defined", "not applicable"
        shown = (
            f"violated in {_percent(found['rows_violated'])} of rows"
            if found["rows_violated"]
            else "violated in no row"
        )
        if found["rows_violated"]:
            shown += f", in {_percent(found['heads_violated'])} of heads"
        if found["rows_vacuous"]:
            shown += f"; says nothing in {_percent(found['rows_vacuous'])} of rows"
        shown += f"; bound / value has median {found['ratio']:.3g}"
        return shown + note, bound_verdict(found, side)

    return judge


def _percent(share: float) -> str:
    """As few digits as tell it from 0 and 100 %."""
    if 0 < share < 0.001 or 0.999 < share < 1:
        return f"{100 * share:.2g} %" if share < 0.5 else f"{100 * share:.3f} %"
    return f"{100 * share:.1f} %"


def _vanishing(evidence: Evidence) -> Judged:
    slope = evidence.heads["max_weight_slope"].dropna()
    median = slope.median()
    shown = f"slope of ln max weight against ln n: median {median:.2f} over {len(slope)} heads; at or below -0.9 in "
    shown += _percent((slope <= VANISHING_SLOPE).mean())
    if median <= VANISHING_SLOPE:
        return shown, "reproduced"
    return shown, "partly" if median < STEADY_SLOPE else "not reproduced"


def _true_linear(evidence: Evidence) -> Judged:
    b = exponent(_long(evidence, TRUE))
    return f"d~ of the top {evidence.settings.length_n} grows as L^{b:.2f}", _reproduced(within(b, LINEAR))


def _long(evidence: Evidence, quantity: str) -> pd.Series:
    """Over the L of at least 4 N: shorter rows are mostly selected."""
    N = evidence.settings.length_n
    curve = evidence.curve("distance_vs_length", quantity, "L", N=N)
    return curve[curve.index >= 4 * N]


def _expected_linear(evidence: Evidence) -> Judged:
    lower, upper, without = (exponent(_long(evidence, name)) for name in (LOWER, UPPER, NO_FACTOR))
    shown = f"E d~ lies between curves that grow as L^{lower:.2f} and L^{upper:.2f}; left without its inclusion factor "
    shown += f"N/(n-1) it would grow as L^{without:.2f}"
    if within(without, LINEAR) and not within(upper, LINEAR):
        shown += ", which is the figure's shape"
    return shown, _reproduced(within(lower, LINEAR) and within(upper, LINEAR))


def _theorem_random(evidence: Evidence) -> Judged:
    found = evidence.bound("theorem_1_random", "published")
    if not found:
        return "no row that sees enough keys", "not applicable"
    shown = (
        f"the published sum is a lower bound; the upper one is {found['ratio']:.3g} times as large (median), so that "
    )
    shown += f"the sum is off by at most {_percent(found['ratio'] - 1)}"
    return shown, "holds" if within(found["ratio"], CLOSE) else "not shown"


def _corollary_2(evidence: Evidence) -> Judged:
    found = evidence.bound("corollary_2", "published")
    if not found:
        return "no row that sees enough keys", "not applicable"
    # One row is on one side only: the two shares add up.
    outside = 2 * found["rows_violated"]
    shown = f"sum ||a_i x_i|| lies outside the interval that E d~ is proved to lie in, in {_percent(outside)} of rows"
    return shown, "violated" if outside > 0 else "holds"


def _plateau_distance(evidence: Evidence) -> Judged:
    curve = evidence.curve("distance_vs_topn", TRUE, "N")
    late = curve[curve.index >= 20]
    if len(late) < 2:
        return "fewer than two N of at least 20", "not applicable"
    ratio = late.iloc[-1] / late.iloc[0]
    return f"d~ at N={late.index[-1]} is {ratio:.2f} times that at N={late.index[0]}", _reproduced(within(ratio, CLOSE))


def _meeting(evidence: Evidence) -> Judged:
    by_name = {name: evidence.curve("distance_vs_topn", name, "N") for name in (TRUE, LOWER, UPPER, NO_FACTOR)}
    N = by_name[TRUE].index[-1]
    if not all(curve.iloc[-1] > 0 for curve in by_name.values()):
        return f"at N={N} a distance is 0: there is no ratio", "not applicable"
    ratios = {name: by_name[TRUE].iloc[-1] / by_name[name].iloc[-1] for name in (LOWER, UPPER, NO_FACTOR)}
    shown = (
        f"at N={N} d~ is {ratios[UPPER]:.2f} to {ratios[LOWER]:.2f} times E d~, and {ratios[NO_FACTOR]:.2f} times the "
    )
    shown += "sum without the inclusion factor"
    return shown, _reproduced(within(ratios[UPPER], CLOSE) and within(ratios[LOWER], CLOSE))


def _critical(evidence: Evidence) -> Judged:
    pooled = evidence.critical[evidence.critical["passage"].isna()]
    longest = pooled[pooled["L"] == pooled["L"].max()]
    first = longest.groupby("comparator")["critical_n"].first()
    L = int(longest["L"].iloc[0])
    texts = {name: "none" if pd.isna(n) else f"{n:.0f} = {n / L:.3f} L" for name, n in first.items()}
    shown = f"at L={L} the first N not rejected is {texts[LOWER]} (lower) and {texts[UPPER]} (upper bound of E d~), "
    shown += f"{texts[NO_FACTOR]} without the inclusion factor"
    wanted = (PAPER_CRITICAL / 2, PAPER_CRITICAL * 2)
    return shown, _reproduced(
        all(not pd.isna(first[name]) and within(first[name] / L, wanted) for name in (LOWER, UPPER))
    )


def _plateau_separability(evidence: Evidence) -> Judged:
    curve = evidence.curve("separability", "separability", "N")
    late = curve[curve.index >= PLATEAU_FROM]
    if late.empty:
        return f"no N of at least {PLATEAU_FROM}", "not applicable"
    values = evidence.curves[evidence.curves["experiment"] == "separability"].set_index("quantity")["value"]
    shown = f"N_s/N lies between {late.min():.2f} and {late.max():.2f} for N from {late.index[0]} to {late.index[-1]}; "
    shown += f"mean cosine of the representations {values['anisotropy']:.2f}, mass on the first key "
    shown += f"{values['first_key_mass']:.2f}. No theorem implies a ceiling"
    return shown, _reproduced(all(within(value, PAPER_PLATEAU) for value in late))


def _sharp(evidence: Evidence) -> Judged:
    curve = evidence.curve("gradient_sensitivity", "sensitivity", "T", eps=min(evidence.settings.steps))
    cold = curve[curve.index <= 0.1]
    b = exponent(cold)
    if math.isnan(b):
        return "fewer than three T of at most 0.1", "not applicable"
    shown = f"max over heads of g grows as T^{b:.2f} for T from {cold.index[0]:g} to {cold.index[-1]:g}"
    return shown, _reproduced(within(-b, LINEAR))


def _mild(evidence: Evidence) -> Judged:
    curve = evidence.curve("gradient_sensitivity", "sensitivity", "T", eps=min(evidence.settings.steps))
    warm = curve[curve.index >= 1]
    if warm.empty or curve.index[0] >= 0.1:
        return "no T below 0.1 and of at least 1 to compare", "not applicable"
    orders = math.log10(curve.iloc[0] / warm.iloc[0])
    shown = f"g at T={warm.index[0]:g} is {orders:.1f} orders of magnitude below that at T={curve.index[0]:g}"
    return shown, _reproduced(1.5 <= orders <= 2.5)


EXPECTATION = (
    ". The theorem speaks of an expectation over vectors uniform on a sphere; here each row is held against it"
)

CLAIMS: tuple[tuple[str, str, str, Callable[[Evidence], Judged]], ...] = (
    ("Vanishing", "Attention weights vanish as 1/L", "vanishing", _vanishing),
    ("Corollary 1", "Weights are at most exp(2D/T)/n", "vanishing", _bound_claim("corollary_1", "published", "upper")),
    (
        "Corollary 1",
        "Weights are at least exp(-2D/T)/n",
        "vanishing",
        _bound_claim("corollary_1", "published", "lower"),
    ),
    (
        *("Corollary 1", "Provable: weights are at most 1/(1 + (n-1) exp(-2D/T))", "vanishing"),
        _bound_claim("corollary_1", "provable", "upper"),
    ),
    (
        *("Theorem 1", "d~ of the top N is at most its bound", "distance_vs_length distance_vs_topn"),
        _bound_claim("theorem_1_fixed", "published", "upper"),
    ),
    (
        *("Theorem 1", "Provable: d~ is (n-N) ||s|| up to one vector", "distance_vs_length distance_vs_topn"),
        _bound_claim("theorem_1_fixed", "provable"),
    ),
    (
        *("Theorem 1", "E d~ of a random N-set equals one sum of norms", "distance_vs_length distance_vs_topn"),
        _theorem_random,
    ),
    (
        *("Corollary 2", "For fixed N, E d~ tends to sum ||a_i x_i||", "distance_vs_length distance_vs_topn"),
        _corollary_2,
    ),
    ("Experiment 1", "d~ grows about linearly with L", "distance_vs_length", _true_linear),
    ("Experiment 1", "E d~ grows about linearly with L", "distance_vs_length", _expected_linear),
    ("Experiment 2", "d~ reaches a plateau beyond N of about 20", "distance_vs_topn", _plateau_distance),
    ("Experiment 2", "d~ and E d~ meet toward N = 100", "distance_vs_topn", _meeting),
    ("Experiment 3", "d~ and E d~ are alike from N of about 0.06 L", "critical_topn", _critical),
    (
        "Theorem 2",
        "N_s/N is at least 1 - sum xi_i/(rN)",
        "separability",
        _bound_claim("theorem_2", "published", "lower", EXPECTATION),
    ),
    (
        *("Theorem 2", "N_s/N is at most the mean of exp(-(xi_i - r)+^2/2)", "separability"),
        _bound_claim("theorem_2", "published", "upper", EXPECTATION),
    ),
    (
        *("Theorem 2", "Provable: i counts whenever r > xi_i", "separability"),
        _bound_claim("theorem_2_sure", "provable", "lower"),
    ),
    ("Experiment 4", "N_s/N settles at 0.70 to 0.85 beyond N = 16", "separability", _plateau_separability),
    (
        *("Corollary 3", "The Jacobian's norm is at most min(1/(4T), sqrt 2)", "gradient_sensitivity vanishing"),
        _bound_claim("corollary_3", "published"),
    ),
    (
        *("Corollary 3", "Provable: it is at most 1/(2T)", "gradient_sensitivity vanishing"),
        _bound_claim("corollary_3", "provable"),
    ),
    (
        *("Corollary 3", "Finite differences g are at most min(1/(4T), sqrt 2)", "gradient_sensitivity"),
        _bound_claim("sensitivity", "published"),
    ),
    (
        *("Corollary 3", "Provable: g is at most min(1/(2T), sqrt(2)/eps)", "gradient_sensitivity"),
        _bound_claim("sensitivity", "provable"),
    ),
    ("Experiment 5", "g grows as 1/T for T below 0.1", "gradient_sensitivity", _sharp),
    ("Experiment 5", "At T >= 1 g is two orders of magnitude lower", "gradient_sensitivity", _mild),
)
