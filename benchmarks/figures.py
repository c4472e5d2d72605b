"""How every benchmark prints its figures and writes them with the machine they were measured on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from attnlimits.rundir import environment


def status_mb(key: str) -> float:
    """VmRSS or VmHWM (peak) of this process. Not ru_maxrss: a child begins with that of its parent. Linux only."""
    (line,) = (row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(key))
    return int(line.split()[1]) / 1024


def report(figures: Mapping[str, float], json_file: Path | None) -> None:
    """Print the figures; write ``{"machine": ..., "figures": ...}`` where a file is given."""
    for name, value in figures.items():
        print(f"{name:34} {value:.4g}")
    if json_file:
        json_file.write_text(json.dumps({"machine": environment(), "figures": dict(figures)}, indent=2) + "\n")
