"""How every benchmark prints its figures and writes them with the machine they were measured on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from attnlimits.rundir import environment


def report(figures: Mapping[str, float], json_file: Path | None) -> None:
    """Print the figures; write ``{"machine": ..., "figures": ...}`` where a file is given."""
    for name, value in figures.items():
        print(f"{name:34} {value:.4g}")
    if json_file:
        json_file.write_text(json.dumps({"machine": environment(), "figures": dict(figures)}, indent=2) + "\n")
