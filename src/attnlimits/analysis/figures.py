"""The paper's figures and heatmaps of the heads, drawn from an analysis' tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from .claims import LOWER, NO_FACTOR, PAPER_CRITICAL, UPPER
from .experiments import Analysis
from .tables import TRUE

INK = "#010203"  # of text and axes; the page puts the reader's text colour in its place
STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#808890",
    "grid.alpha": 0.25,
    "axes.facecolor": "none",
    "legend.frameon": False,
    "font.size": 10,
    "svg.fonttype": "none",  # text stays text
}
# Told apart on white and on black, and by the colour-blind.
BLUE, ORANGE, GREEN, PURPLE, GREY, RED = "#3b7dd8", "#e07b00", "#1a9870", "#a763c9", "#808890", "#d64550"
CURVES = {
    TRUE: ("d~ of the top N", BLUE, "-"),
    "distance_published": ("bound as published", RED, "--"),
    "distance_upper": ("provable upper bound", GREY, ":"),
    LOWER: ("E d~, lower (published sum)", GREEN, "-"),
    UPPER: ("E d~, upper", GREEN, "--"),
    NO_FACTOR: ("the sum without N/(n-1)", ORANGE, "-."),
}
HEATMAPS = {
    "max_weight": "largest weight",
    "max_weight_slope": "slope of ln max weight",
    "entropy": "entropy / ln n",
    "first_key_mass": "mass on first key",
    "anisotropy": "mean cosine of x",
    "jacobian_norm": "Jacobian norm",
}
STEP_STYLES = ("-", "--", "-.", ":")


def draw(analysis: Analysis, about: str) -> dict[str, Figure]:
    """A figure an experiment that was run, and the heatmaps; each says at its foot what it is ``about``."""
    found = {}
    for name, paint in (*PAINTERS.items(), ("heads", _heads)):
        if name == "heads" or analysis.settings.runs(name):
            with rc_context(STYLE):
                figure = Figure(figsize=(7.2, 4.6), layout="constrained")
                paint(figure, analysis)
                figure.supxlabel(about, fontsize=7.5, wrap=True)
                found[name] = figure
    return found


def _curve(analysis: Analysis, experiment: str, quantity: str, index: str, **at: float) -> pd.DataFrame:
    table = analysis.curves
    part = table[(table["experiment"] == experiment) & (table["quantity"] == quantity)]
    for name, value in at.items():
        part = part[part[name] == value]
    return part.dropna(subset=["value"]).sort_values(index).astype({index: float})


def _plot(axes: Axes, curve: pd.DataFrame, index: str, label: str, colour: str, style: str) -> None:
    """A line with its band where there is one."""
    if curve.empty:
        return
    axes.plot(curve[index], curve["value"], style, color=colour, label=label, marker="o", markersize=3)
    if curve["low"].notna().all():
        axes.fill_between(curve[index], curve["low"], curve["high"], color=colour, alpha=0.2, linewidth=0)


def _log_ticks(axes: Axes, values: pd.Series | np.ndarray, scale: str = "log") -> None:
    axes.set_xscale(scale)
    axes.xaxis.set_major_locator(FixedLocator(sorted(set(map(float, values)))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _distance_vs_length(figure: Figure, analysis: Analysis) -> None:
    axes, N = figure.subplots(), analysis.settings.length_n
    for quantity, look in CURVES.items():
        _plot(axes, _curve(analysis, "distance_vs_length", quantity, "L"), "L", *look)
    _log_ticks(axes, analysis.settings.lengths_within(analysis.length))
    axes.set(yscale="log", xlabel="context length L", ylabel="distance, mean over rows and heads")
    axes.set_title(f"Distance of the others from the top {N} against L")
    axes.legend()


def _distance_vs_topn(figure: Figure, analysis: Analysis) -> None:
    axes = figure.subplots()
    for quantity, look in CURVES.items():
        _plot(axes, _curve(analysis, "distance_vs_topn", quantity, "N"), "N", *look)
    _log_ticks(axes, analysis.settings.top_n)
    axes.set(yscale="log", xlabel="N", ylabel="distance, mean over rows and heads")
    axes.set_title(f"Distance of the others from the top N, L = {analysis.length}")
    axes.legend()


def _critical_topn(figure: Figure, analysis: Analysis) -> None:
    axes, table = figure.subplots(), analysis.critical
    lengths = np.array(sorted(table["L"].unique()), dtype=float)
    for name in (LOWER, UPPER, NO_FACTOR):
        label, colour, style = CURVES[name]
        first = table[table["passage"].isna() & (table["comparator"] == name)].groupby("L")["critical_n"].first()
        values = first.reindex(lengths).astype(float)
        missing = f" (none at {values.isna().sum()} of {len(values)} L)" if values.isna().any() else ""
        axes.plot(lengths, values, style, color=colour, marker="o", markersize=4, label=label + missing)
    axes.plot(lengths, PAPER_CRITICAL * lengths, color=GREY, label=f"the paper's {PAPER_CRITICAL} L")
    _log_ticks(axes, lengths)
    level = analysis.settings.ks_level
    axes.set(yscale="log", xlabel="context length L", ylabel=f"first N not rejected at {level:g}")
    axes.set_title("From which N on d~ and its expectation are alike over heads")
    axes.legend()


def _separability(figure: Figure, analysis: Analysis) -> None:
    axes, table = figure.subplots(), analysis.results
    part = table[(table["experiment"] == "separability") & (table["quantity"] == "separability")]
    heads = part.groupby(["N", "layer", "head"])["value"].mean()
    sizes = sorted(part["N"].unique())
    boxes = axes.boxplot([heads[N].dropna().to_numpy() for N in sizes], widths=0.5, patch_artist=True)
    for name in ("boxes", "medians", "whiskers", "caps", "fliers"):
        for artist in boxes[name]:
            artist.set(**{"markeredgecolor": BLUE} if name == "fliers" else {"color": BLUE})
    for box in boxes["boxes"]:
        box.set_facecolor("none")
    for quantity, label, style in (
        ("separability_published_upper", "upper as published", "--"),
        ("separability_published_lower", "lower as published", ":"),
        ("separability_sure", "surely inside (provable)", "-"),
    ):
        values = _curve(analysis, "separability", quantity, "N").set_index("N")["value"].reindex(map(float, sizes))
        colour = GREEN if style == "-" else RED
        axes.plot(range(1, len(sizes) + 1), values.clip(lower=0), style, color=colour, label=label)
    axes.axhspan(0.70, 0.85, color=ORANGE, alpha=0.15, label="the paper's plateau")
    axes.set(xticks=range(1, len(sizes) + 1), xticklabels=sizes, xlabel="N", ylabel="N_s/N", ylim=(-0.03, 1.03))
    axes.set_title(f"Share of the top N that a head separates, a box over heads, L = {analysis.length}")
    figure.legend(loc="outside upper center", ncols=4, fontsize=8, columnspacing=1.2)


def _gradient_sensitivity(figure: Figure, analysis: Analysis) -> None:
    axes, settings = figure.subplots(), analysis.settings
    T = np.array(sorted(settings.temperatures))
    axes.plot(T, 1 / (2 * T), "-", color=GREY, label="provable, small steps: 1/(2T)")
    axes.plot(T, np.minimum(1 / (4 * T), np.sqrt(2)), "--", color=RED, label="as published: min(1/(4T), sqrt 2)")
    for eps, colour, style in zip(sorted(settings.steps), (BLUE, GREEN, PURPLE) * 9, STEP_STYLES * 9, strict=False):
        curve = _curve(analysis, "gradient_sensitivity", "sensitivity", "T", eps=eps)
        _plot(axes, curve, "T", f"g, step {eps:g}", colour, style)
    axes.set(xscale="log", yscale="log", xlabel="temperature T", ylabel="g, mean over rows, maximum over heads")
    axes.set_title("How far a random step moves the weights")
    axes.legend()


def _vanishing(figure: Figure, analysis: Analysis) -> None:
    axes = figure.subplots()
    for quantity, *look in (
        ("max_weight", "largest weight", BLUE, "-"),
        ("max_weight_upper", "provable upper bound", GREY, ":"),
        ("top_mass", "mass of the 10 largest", GREEN, "--"),
        ("first_key_mass", "mass on the first key", ORANGE, "-."),
    ):
        _plot(axes, _curve(analysis, "vanishing", quantity, "L"), "L", *look)
    lengths = np.array(analysis.settings.lengths_within(analysis.length))
    uniform = [(1 / np.arange(L // 2 + 1, L + 1)).mean() for L in lengths]
    axes.plot(lengths, uniform, color=RED, linestyle="--", label="uniform: mean of 1/n")
    _log_ticks(axes, lengths)
    axes.set(yscale="log", xlabel="L: rows that see L/2 to L keys", ylabel="weight, mean over rows and heads")
    axes.set_title("Do weights vanish with the length?")
    axes.legend()


def _heads(figure: Figure, analysis: Analysis) -> None:
    """Layers down, heads across; what was not measured is left out."""
    names = [name for name in analysis.heads.columns if name in HEATMAPS or name.startswith("separability_n")]
    n_columns = min(3, len(names))
    n_rows = -(-len(names) // n_columns)
    n_layers, n_heads = analysis.heads["layer"].nunique(), analysis.heads["head"].nunique()
    figure.set_size_inches(9, max(2.2, 0.28 * n_layers + 0.9) * n_rows + 0.4)
    grid = figure.subplots(n_rows, n_columns, squeeze=False).flatten()
    for axes, name in zip(grid, names, strict=False):
        values = analysis.heads.pivot(index="layer", columns="head", values=name).to_numpy(float)
        image = axes.imshow(values, cmap="viridis", aspect="auto")
        ticks = {"xticks": range(0, n_heads, -(-n_heads // 12)), "yticks": range(0, n_layers, -(-n_layers // 12))}
        axes.set(**ticks, xlabel="head", ylabel="layer")
        axes.set_title(HEATMAPS.get(name, f"N_s/N, N = {name.rpartition('n')[2]}"), fontsize=10)
        axes.grid(False)
        figure.colorbar(image).outline.set_visible(False)
    for axes in grid[len(names) :]:
        axes.set_axis_off()


PAINTERS: dict[str, Callable[[Figure, Analysis], None]] = {
    "distance_vs_length": _distance_vs_length,
    "distance_vs_topn": _distance_vs_topn,
    "critical_topn": _critical_topn,
    "separability": _separability,
    "gradient_sensitivity": _gradient_sensitivity,
    "vanishing": _vanishing,
}
