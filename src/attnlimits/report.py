"""The table with which train.py ends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def print_report(directory: Path, summary: dict[str, Any]) -> None:
    """Loss and perplexity before and after, speed, and what to do next."""
    shown = Path(os.path.relpath(directory))
    table = Table(title=f"{summary['name']}: {summary['steps']} steps, {summary['tokens_per_second']:,.0f} tokens/s")
    for column in ("validation", "step", "loss", "perplexity", "bits/character"):
        table.add_column(column, justify="left" if column == "validation" else "right")
    for name in ("before", "after", "best"):
        row = summary[name]
        numbers = (f"{row['val/loss']:.4f}", f"{row['val/perplexity']:.2f}", f"{row['val/bits_per_character']:.3f}")
        table.add_row(name, f"{row['step']:.0f}", *numbers)
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    console.print(f"run directory  {shown}")
    console.print(f"look           python -m attnlimits.dashboard {shown}")
    console.print(f"analyse        python analyze.py ckpt_path={shown / 'model'}")
    console.print(f'load           python -c "from attnlimits.backbone import load; load({str(shown / "model")!r})"')
    console.print(f"go on          python train.py ckpt_path={shown}/checkpoints/last.ckpt trainer.max_steps=...")
    if any((directory / "wandb").glob("offline-run-*")):
        console.print(f"send to W&B    wandb sync {shown}/wandb/offline-run-*")
