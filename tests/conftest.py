"""What the tests share: tiny models, the composed configuration, and runs of train.py in-process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_SILENT"] = "true"

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from transformers import GPT2Config, GPT2LMHeadModel

from attnlimits import backbone, config
from attnlimits.training import train

PROJECT = Path(__file__).resolve().parents[1]
WORDS = ("the", "old", "prince", "looked", "at", "window", "and", "said", "nothing", "of", "war", ",", "snow", "fell")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine; .ci/run installs one")


@pytest.fixture(autouse=True)
def _private_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or fills the user's caches."""
    monkeypatch.setenv("ATTNLIMITS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "wandb-cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "wandb-data"))


@pytest.fixture
def compose_train() -> Callable[[Sequence[str]], DictConfig]:
    """``compose_train(["T=0.05"])``: conf/train.yaml with overrides, as train.py sees it."""

    def composed(overrides: Sequence[str] = ()) -> DictConfig:
        config.register()
        with initialize_config_dir(str(PROJECT / "conf"), version_base="1.3"):
            return compose("train", overrides=list(overrides))

    return composed


def random_words(n_words: int, seed: int = 0) -> str:
    """Text with some structure: a tiny model learns from it within a few steps."""
    picks = torch.randint(len(WORDS), (n_words,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[i] for i in picks.tolist()) + "\n"


@pytest.fixture(scope="session")
def novel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "novel.txt"
    path.write_text(random_words(6000), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of two layers with its own tokenizer, as a Hugging Face directory."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = backbone.train_tokenizer([random_words(2000)], vocab_size=300, n_positions=64)
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": len(tokenizer)}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def tiny_run(tiny_model: Path, novel: Path) -> list[str]:
    """Overrides that make train.py a matter of seconds."""
    return [
        f"model.path={tiny_model}",
        "data=text",
        f"data.path={novel}",
        "data.batch_size=4",
        "context_length=32",
        "trainer.max_steps=6",
        "trainer.validate_every=3",
        "trainer.validation_blocks=8",
        "trainer.log_every=1",
        "trainer.accelerator=cpu",
        "trainer.devices=1",
    ]


@pytest.fixture
def run(compose_train: Callable, tiny_run: list[str], tmp_path: Path) -> Callable[..., Any]:
    """``run("T=0.5")``: train() in its own run directory, CSV only unless told."""

    def trained(*overrides: str, directory: str = "run") -> Any:
        base = [o for o in [*tiny_run, "logger=csv"] if o.split("=")[0] not in {x.split("=")[0] for x in overrides}]
        resume = [o for o in overrides if o.startswith("ckpt_path=")]
        return train(compose_train([*base, *overrides]), tmp_path / directory, overrides=overrides if resume else ())

    return trained


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=[*flags, "--disable-component-update"])
        yield opened
        opened.close()
