"""The run directory: everything a run was and gave, readable without this package.

====================  ==================================================================================
config.yaml           the resolved configuration
environment.json      command, versions, git commit and whether dirty, CPU and GPU
metrics.csv           every logged number, x = step
checkpoints/          best.ckpt, last.ckpt
tokenizer/            so that the run resumes without the model's source
model/                Hugging Face directory of the best checkpoint
wandb/                the W&B record, if that logger is on
summary.json          final numbers, tokens/s, exit reason; seconds are those of the last process
====================  ==================================================================================
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from .config import PROJECT

PACKAGES = (
    *("attnlimits", "torch", "lightning", "transformers", "hydra-core", "wandb", "datasets", "torchmetrics", "numpy"),
)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all. JSON has no inf and nan: they become the strings "inf" and "nan"."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(_strict(content), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_config(directory: Path, cfg: DictConfig) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(cfg, directory / "config.yaml", resolve=True)


def environment() -> dict[str, Any]:
    """What a number depends on beside the configuration."""
    return {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "git": git_state(PROJECT),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cpu_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in _lines(cpuinfo) if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()} x {os.cpu_count()}"


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []


def git_state(directory: Path) -> dict[str, Any] | None:
    """Commit and whether tracked files differ from it; None outside a checkout or without git."""
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "dirty": bool(_git(directory, "status", "--porcelain", "--untracked-files=no"))}


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
