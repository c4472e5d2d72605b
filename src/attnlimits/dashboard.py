"""``python -m attnlimits.dashboard outputs/<date>/<run>``: a run as one offline HTML page, or as a saved view in W&B.

Both show the same layout: loss, vanishing, separability, gradients. The page is ``dashboard.html`` in the run directory
and needs no network. ``--wandb entity/project`` saves the view for a user who is logged in; that takes the package
wandb-workspaces.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from .page import document

STEP = "trainer/global_step"


@dataclass(frozen=True)
class Section:
    """A heading, the keys drawn over training, and the metrics drawn as layers x heads at the last measured step.

    A key that ends in ``nN`` stands for every N that was measured.
    """

    title: str
    lines: tuple[str, ...]
    heatmaps: tuple[str, ...] = ()


LAYOUT = (
    Section("Loss", ("train/loss", "val/loss", "val/perplexity", "train/lr")),
    Section(
        "Vanishing",
        ("attention/max_weight", "attention/entropy", "attention/max_weight_slope", "attention/first_key_mass"),
        ("max_weight", "entropy", "max_weight_slope", "effective_keys"),
    ),
    Section(
        "Separability",
        ("attention/separability_nN", "attention/distance_nN", "attention/anisotropy"),
        ("separability_nN", "anisotropy"),
    ),
    Section(
        "Gradients",
        ("gradients/norm", "gradients/norm_clipped", "attention/jacobian_norm", "attention/logit_gradient"),
        ("jacobian_norm", "jacobian_above_published", "logit_gradient"),
    ),
)


def expand(names: Sequence[str], available: Sequence[str]) -> list[str]:
    """The names that are there, ``_nN`` replaced by every N that is."""
    found = []
    for name in names:
        pattern = re.compile(re.escape(name).replace("_nN", r"_n\d+"))
        found += sorted((key for key in available if pattern.fullmatch(key)), key=lambda key: (len(key), key))
    return found


# ------------------------------------------------------------------------------------------------------- the page

STYLE = """
.grid { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 300px), 1fr)); }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--faint); font-size: 11px; }
polyline { fill: none; stroke: var(--line); stroke-width: 2; } polyline.layer { opacity: .3; stroke-width: 1; }
circle { fill: var(--line); }
.heat { display: grid; gap: 1px; font-size: 10px; color: var(--faint); }
.heat span { min-width: 0; text-align: center; overflow: hidden; } .cell { aspect-ratio: 1; border-radius: 2px; }
.scale { display: flex; gap: .5rem; align-items: center; margin-top: .4rem; font-size: 11px; color: var(--faint); }
.scale i { flex: 1; height: 8px; border-radius: 4px; }
"""
VIRIDIS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))


def page(directory: Path) -> str:
    """The run as one self-contained HTML document.

    Raises:
        FileNotFoundError: the directory holds no metrics.csv.
    """
    metrics = pd.read_csv(directory / "metrics.csv").groupby("step").first()
    heads_file = directory / "heads.parquet"
    heads = pd.read_parquet(heads_file) if heads_file.is_file() else pd.DataFrame()
    summary = _json(directory / "summary.json")
    title = html.escape(str(summary.get("name", directory.name)))
    body = "".join(_section(section, metrics, heads) for section in LAYOUT)
    about = f"<p>{html.escape(_about(summary, metrics))}</p>"
    return document(title, f"<h1>{title}</h1>{about}{_verdicts(heads)}{body}", STYLE)


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _about(summary: dict[str, Any], metrics: pd.DataFrame) -> str:
    named = {
        "normalizer": summary.get("normalizer", {}).get("name"),
        "T": summary.get("T"),
        "context": summary.get("context_length"),
        "steps": metrics.index.max(),
        "perplexity": f"{summary['val/perplexity']:.2f}" if "val/perplexity" in summary else None,
        "exit": summary.get("exit_reason", "running, or killed"),
    }
    return ", ".join(f"{key} {value}" for key, value in named.items() if value is not None)


def _verdicts(heads: pd.DataFrame) -> str:
    if heads.empty:
        return "<p>No heads.parquet: the run did not measure attention.</p>"
    last = heads[heads["step"] == heads["step"].max()]
    counts = ", ".join(f"{count} {word}" for word, count in last["verdict"].value_counts().items())
    return f"<p>Heads at step {last['step'].iloc[0]}: {counts} of {len(last)}.</p>"


def _section(section: Section, metrics: pd.DataFrame, heads: pd.DataFrame) -> str:
    cards = [_chart(key, metrics) for key in expand(section.lines, list(metrics.columns))]
    cards += [_heatmap(name, heads) for name in expand(section.heatmaps, list(heads.columns))]
    return f'<section><h2>{section.title}</h2><div class="grid">{"".join(cards)}</div></section>' if cards else ""


def _chart(key: str, metrics: pd.DataFrame) -> str:
    """A line over steps, its layers faint behind it; a single point as a dot."""
    layers = [column for column in metrics.columns if column.startswith(f"{key}/layer_")]
    drawn = metrics[[*layers, key]].dropna(how="all")
    low, high = drawn.min().min(), drawn.max().max()
    first, last = drawn.index.min(), drawn.index.max()

    def at(step: float, value: float) -> tuple[float, float]:
        x = 56 + 236 * (step - first) / max(last - first, 1)
        return x, 118 - 104 * ((value - low) / (high - low) if high > low else 0.5)

    shapes = []
    for column in drawn.columns:
        points = [at(step, value) for step, value in drawn[column].dropna().items()]
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        shapes.append(f'<polyline class="{"layer" if column in layers else "mean"}" points="{text}"/>')
    x, y = points[-1]
    top, bottom = _apart(high, low)
    labels = (
        f'<text x="52" y="18" text-anchor="end">{top}</text>'
        f'<text x="52" y="120" text-anchor="end">{bottom}</text>'
        f'<text x="56" y="136">{first}</text><text x="292" y="136" text-anchor="end">{last}</text>'
    )
    value = _short(drawn[key].dropna().iloc[-1])
    return (
        f'<div class="card"><h3>{html.escape(key)} = {value}</h3><svg viewBox="0 0 300 140" role="img" '
        f'aria-label="{html.escape(key)} over steps">{labels}{"".join(shapes)}'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/></svg></div>'
    )


def _heatmap(name: str, heads: pd.DataFrame) -> str:
    """Layers down, heads across, at the last step; a head without a value stays blank."""
    last = heads[heads["step"] == heads["step"].max()]
    table = last.pivot(index="layer", columns="head", values=name)
    low, high = table.min().min(), table.max().max()
    cells = ["<span></span>", *(f"<span>{head}</span>" for head in table.columns)]
    for layer, row in table.iterrows():
        cells.append(f"<span>{layer}</span>")
        cells += [_cell(f"layer {layer} head {head}", value, low, high) for head, value in row.items()]
    bottom, top = _apart(low, high)
    columns = f"grid-template-columns: 1.6em repeat({len(table.columns)}, 1fr)"
    stops = ", ".join(f"rgb{colour}" for colour in VIRIDIS)
    return (
        f'<div class="card"><h3>{html.escape(name)} by layer and head, step {last["step"].iloc[0]}</h3>'
        f'<div class="heat" style="{columns}">{"".join(cells)}</div><div class="scale">{bottom}'
        f'<i style="background: linear-gradient(90deg, {stops})"></i>{top}</div></div>'
    )


def _cell(where: str, value: float, low: float, high: float) -> str:
    if math.isnan(value):
        return f'<span class="cell" title="{where}: undefined"></span>'
    colour = _colour((value - low) / (high - low) if high > low else 0.5)
    return f'<span class="cell" title="{where}: {_short(value)}" style="background: rgb{colour}"></span>'


def _colour(position: float) -> tuple[int, ...]:
    scaled = position * (len(VIRIDIS) - 1)
    index = min(int(scaled), len(VIRIDIS) - 2)
    pairs = zip(VIRIDIS[index], VIRIDIS[index + 1], strict=True)
    return tuple(round(a + (b - a) * (scaled - index)) for a, b in pairs)


def _short(value: float) -> str:
    return f"{value:.3g}"


def _apart(a: float, b: float) -> tuple[str, str]:
    """Both in as many digits as it takes to tell them apart, six at most."""
    for digits in range(3, 7):
        texts = f"{a:.{digits}g}", f"{b:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return texts


# ----------------------------------------------------------------------------------------------------------- W&B


def workspace(entity: str, project: str, available: Sequence[str]) -> Any:
    """The same layout as a W&B workspace, not yet saved; pictures are those that the probe logged.

    Raises:
        ModuleNotFoundError: wandb-workspaces is not installed.
    """
    import wandb_workspaces.reports.v2 as panels
    import wandb_workspaces.workspaces as workspaces

    def section(part: Section) -> Any:
        drawn: list[Any] = [panels.LinePlot(x=STEP, y=[key]) for key in expand(part.lines, available)]
        pictures = expand([f"heads/{name}" for name in part.heatmaps], available)
        drawn += [panels.MediaBrowser(media_keys=[key]) for key in pictures]
        return workspaces.Section(name=part.title, panels=drawn, is_open=True)

    sections = [section(part) for part in LAYOUT]
    return workspaces.Workspace(entity=entity, project=project, name="attnlimits", sections=sections)


def _save_workspace(target: str, directory: Path) -> None:
    entity, _, project = target.partition("/")
    if not entity or not project:
        raise SystemExit(f"error: --wandb {target}: must be entity/project")
    columns = pd.read_csv(directory / "metrics.csv", nrows=0).columns
    heatmaps = [f"heads/{name}" for name in pd.read_parquet(directory / "heads.parquet").columns]
    try:
        print(f"saved view     {workspace(entity, project, [*columns, *heatmaps]).save().url}")
    except ModuleNotFoundError as error:
        raise SystemExit(f"error: --wandb {target}: {error}; pip install wandb-workspaces") from error


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m attnlimits.dashboard", description="A run as one page.")
    parser.add_argument("run", type=Path, help="a run directory of train.py")
    parser.add_argument("--wandb", metavar="ENTITY/PROJECT", help="save the view in W&B instead (after `wandb login`)")
    options = parser.parse_args(arguments)
    if not (options.run / "metrics.csv").is_file():
        print(f"error: {options.run}: holds no metrics.csv; give a run directory of train.py", file=sys.stderr)
        raise SystemExit(2)
    if options.wandb:
        return _save_workspace(options.wandb, options.run)
    target = options.run / "dashboard.html"
    target.write_text(page(options.run), encoding="utf-8")
    print(target)


if __name__ == "__main__":
    main()
