"""An analysis as files: tables, figures, summary.json, and one page that needs nothing else.

==========================  ============================================================================
tables/<name>.parquet, csv  results, curves, critical, audit, heads, claims: columns in docs/analysis.md
figures/<name>.png, svg     an experiment each, and heatmaps of the heads
summary.json                claims, verdict counts, what was analysed
report.html                 all of it in one file, without network
==========================  ============================================================================
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

from .. import rundir
from ..page import document
from .experiments import Analysis
from .figures import INK, STYLE, draw

PRINTED_INK = "#1c2330"
CAPTIONS = {
    "distance_vs_length": (
        "Experiment 1. d~ sums the distances of all keys outside of the top N from the selected sum s. It is "
        "(n - N) ||s|| up to one vector. Means over the rows of the first L tokens that see more than N keys."
    ),
    "distance_vs_topn": (
        "Experiment 2. The same against N. E d~ is over N keys drawn at random; it lies between two curves."
    ),
    "critical_topn": (
        "Experiment 3. A two-sample Kolmogorov-Smirnov test of the heads' mean d~ against their mean expectation: the "
        "first N at which it does not reject that they are alike. A missing point: it rejects at every N tried."
    ),
    "separability": (
        "Experiment 4. N_s/N, the share of the top N nearer to their sum than the nearest outsider, x of unit length. "
        "The bounds as published are means over heads; they presume vectors that are uniform on a sphere."
    ),
    "gradient_sensitivity": (
        "Experiment 5. Logits are moved by eps in one random direction a row. The head with the largest mean is drawn."
    ),
    "vanishing": "A weight that vanishes as 1/n falls along the dashed line. A bound at 1 says nothing.",
    "heads": "Every head, averaged over rows and passages. A head without a value stays blank.",
}
REPORT_STYLE = """
.claims { display: grid; gap: .5rem; } .claim { display: grid; gap: .1rem 1rem; }
.claim b { font-weight: 600; } .claim p { margin: 0; }
.claim .verdict { font-size: .8rem; font-weight: 600; border-radius: 99px; padding: .1rem .6rem; justify-self: start;
  align-self: start; background: light-dark(#e3e6eb, #333b48); }
.verdict.bad { background: light-dark(#fbdcdc, #5c2328); } .verdict.good { background: light-dark(#d3f0e0, #174a35); }
@media (min-width: 760px) { .claim { grid-template-columns: 8rem 1fr 1.3fr 9rem; } }
figure { margin: 0; } figure svg { display: block; width: 100%; min-width: 520px; height: auto; color: var(--ink); }
figcaption { color: var(--faint); font-size: .85rem; margin-top: .4rem; }
.figures { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 560px), 1fr)); }
.wide { grid-column: 1 / -1; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .6rem; text-align: right; white-space: nowrap; } th { text-align: left; }
summary { cursor: pointer; font-weight: 600; }
"""
GOOD, BAD = ("holds", "reproduced"), ("violated", "not reproduced")


def write_report(analysis: Analysis, directory: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Write everything; the content of summary.json comes back.

    Args:
        analysis: to be written.
        directory: of the run, exists.
        about: what was analysed, in the order in which it is shown: model, text, ...
    """
    (directory / "tables").mkdir(exist_ok=True)
    for name, table in analysis.tables().items():
        table.to_parquet(directory / "tables" / f"{name}.parquet", index=False)
        table.to_csv(directory / "tables" / f"{name}.csv", index=False)
    line = describe(about)
    figures = draw(analysis, line)
    save_figures(figures, directory / "figures")
    name = str(about["name"])
    (directory / "report.html").write_text(page(analysis, figures, name, line), encoding="utf-8")
    summary = {"exit_reason": "completed", **about} | _findings(analysis)
    rundir.write_json(directory / "summary.json", summary)
    return summary


def describe(about: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in about.items() if key not in ("name", "seconds"))


def _findings(analysis: Analysis) -> dict[str, Any]:
    findings: dict[str, Any] = {"claims": analysis.claims.to_dict("records")}
    if "verdict" in analysis.heads:
        findings["heads"] = analysis.heads["verdict"].value_counts().to_dict()
    return findings


def save_figures(figures: Mapping[str, Figure], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, figure in figures.items():
        with rc_context(STYLE):
            figure.savefig(folder / f"{name}.png", dpi=150)
        (folder / f"{name}.svg").write_text(_svg(name, figure).replace(INK, PRINTED_INK), encoding="utf-8")


def _svg(name: str, figure: Figure) -> str:
    """The figure as an <svg> element whose ids no other figure of the page has."""
    buffer = io.StringIO()
    with rc_context({**STYLE, "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", text[text.index("<svg") :])
    return re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)


# ------------------------------------------------------------------------------------------------------- the page


def page(analysis: Analysis, figures: Mapping[str, Figure], name: str, about: str) -> str:
    """The report as one self-contained HTML document."""
    title = html.escape(name)
    parts = (
        f"<h1>{title}</h1><p>{html.escape(about)}</p>{_verdicts(analysis.heads)}",
        f"<h2>Claims of the paper</h2>{_claims(analysis.claims)}",
        f'<h2>Figures</h2><div class="figures">{"".join(_figure(*item) for item in figures.items())}</div>',
        f"<h2>Audit</h2><p>{AUDIT_TEXT}</p>{_details(analysis.audit)}",
    )
    return document(title, "".join(parts), REPORT_STYLE)


AUDIT_TEXT = (
    "Every bound against every row. violated, vacuous: shares of the rows on which it fails or says nothing. "
    "heads_with: share of heads with a violating row. slack and ratio (bound / value) are medians. "
    "docs/analysis.md says more."
)


def _verdicts(heads: pd.DataFrame) -> str:
    if "verdict" not in heads:
        return ""
    counts = ", ".join(f"{count} {word}" for word, count in heads["verdict"].value_counts().items())
    return f"<p>Heads: {counts} of {len(heads)}.</p>"


def _claims(claims: pd.DataFrame) -> str:
    return f'<div class="claims">{"".join(_claim(row) for row in claims.to_dict("records"))}</div>'


def _claim(row: Mapping[str, str]) -> str:
    colour = "good" if row["verdict"].startswith(GOOD) else "bad" if row["verdict"].startswith(BAD) else ""
    cells = {key: html.escape(row[key]) for key in ("section", "claim", "shown", "verdict")}
    return (
        f'<div class="card claim"><p>{cells["section"]}</p><b>{cells["claim"]}</b><p>{cells["shown"]}</p>'
        f'<span class="verdict {colour}">{cells["verdict"]}</span></div>'
    )


def _figure(name: str, figure: Figure) -> str:
    return figure_html(name, figure, caption=CAPTIONS[name], wide=name == "heads")


def figure_html(name: str, figure: Figure, *, caption: str, wide: bool) -> str:
    """A card with the figure in the reader's text colour."""
    svg = _svg(name, figure).replace(INK, "currentColor")
    card = "card wide" if wide else "card"
    text = f"<figcaption>{caption}</figcaption>" if caption else ""
    return f'<figure id="figure-{name}" class="{card}"><div class="scroll">{svg}</div>{text}</figure>'


def _details(audit: pd.DataFrame) -> str:
    shown = audit.rename(
        columns={"rows_violated": "violated", "rows_vacuous": "vacuous", "heads_violated": "heads_with"}
    )
    text = shown.to_html(index=False, border=0, na_rep="", float_format=lambda value: f"{value:.4g}")
    return f'<details class="card"><summary>{len(audit)} bounds</summary><div class="scroll">{text}</div></details>'
