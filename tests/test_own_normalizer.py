"""docs/add-a-normalizer.md, done as it says."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from conftest import PROJECT
from omegaconf import OmegaConf

import train as train_script
from attnlimits import backbone, cli
from attnlimits.attention import attention_layers
from attnlimits.config import TrainConfig
from attnlimits.normalizers import REGISTRY

PAGE = (PROJECT / "docs" / "add-a-normalizer.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return found


def test_own_normalizer_trains_from_its_own_folder(
    tmp_path: Path, tiny_run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "conf" / "normalizer").mkdir(parents=True)
    (tmp_path / "mine" / "squared.py").write_text(block("python"))
    (tmp_path / "mine" / "conf" / "normalizer" / "squared.yaml").write_text(block("yaml"))
    environment, _, _, *arguments = shlex.split(block("bash"))
    monkeypatch.syspath_prepend(environment.removeprefix("PYTHONPATH="))
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments, *tiny_run, "logger=csv"])
    try:
        cli.launch(train_script.main, TrainConfig)
        (directory,) = Path("outputs").glob("*/*")
        assert OmegaConf.load(directory / "config.yaml").normalizer.shift == 0.5
        model = backbone.load(directory / "model")
        assert [layer.normalizer.shift for _, layer in attention_layers(model)] == [0.5, 0.5]
    finally:
        REGISTRY.pop("squared", None)
        sys.modules.pop("squared", None)
