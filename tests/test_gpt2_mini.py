"""The embedded model is what its provenance says."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import PROJECT
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from attnlimits.normalizers import REGISTRY
from attnlimits.training import train

MINI = PROJECT / "models" / "gpt2-mini"
WAR_AND_PEACE = PROJECT.parent / "shared" / "data" / "war_and_peace.txt"


@pytest.fixture(scope="module")
def mini() -> PreTrainedModel:
    """As a user without this package loads it."""
    return AutoModelForCausalLM.from_pretrained(MINI).eval()


def test_shape_and_size(mini: PreTrainedModel) -> None:
    config = mini.config
    assert config.model_type == "gpt2"
    assert config.n_positions == 1024
    assert config.n_layer * config.n_head >= 24
    assert 4000 <= config.vocab_size <= 8192
    assert config.vocab_size == len(AutoTokenizer.from_pretrained(MINI))
    assert {parameter.dtype for parameter in mini.parameters()} == {torch.float32}
    assert (MINI / "model.safetensors").stat().st_size <= 16 * 2**20


def test_it_has_learnt_english(mini: PreTrainedModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MINI)
    good, shuffled = "He was a man of the world, and she was not.", "world the of man a was He, not was she and."
    ids = [torch.tensor([tokenizer(text)["input_ids"]]) for text in (good, shuffled)]
    losses = [mini(row, labels=row).loss.item() for row in ids]
    assert losses[0] < losses[1] - 1
    assert losses[0] < math.log(len(tokenizer)) - 3


@pytest.mark.slow
@pytest.mark.skipif(not WAR_AND_PEACE.is_file(), reason="the novel is not part of the repository")
def test_bits_per_character_on_the_unseen_end_of_war_and_peace(
    mini: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PROJECT / "benchmarks"))
    from gpt2_mini import bits_per_character

    text = WAR_AND_PEACE.read_text(encoding="utf-8")
    held_out = text[len(text) - round(len(text) * 0.05) :]
    assert bits_per_character(mini, AutoTokenizer.from_pretrained(MINI), held_out, 1024) <= 1.65


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_loss_falls_with_every_normalizer(name: str, compose_train: Callable, tmp_path: Path) -> None:
    """train.py normalizer=NAME with the default model, text and learning rate; only shorter."""
    shorter = ["context_length=64", "trainer.max_steps=12", "trainer.validate_every=12", "trainer.validation_blocks=16"]
    machine = ["logger=csv", "trainer.accelerator=cpu", "trainer.devices=1", "callbacks=none"]
    summary = train(compose_train([f"normalizer={name}", *shorter, *machine]), tmp_path / "run").summary
    assert summary["after"]["val/loss"] < summary["before"]["val/loss"] - 0.1
