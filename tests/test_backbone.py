"""Load, save, reload: with our normalizer by one call, and without this package as plain Hugging Face."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import PROJECT
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from attnlimits import backbone
from attnlimits.attention import attention_layers
from attnlimits.config import ConfigError
from attnlimits.normalizers import REGISTRY

TOKENS = torch.arange(20)[None] % 7


def built(compose_train: Callable, tiny_model: Path, *overrides: str) -> tuple:
    return backbone.build(compose_train([f"model.path={tiny_model}", "context_length=32", *overrides]), corpus=[])


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_saved_directory_reloads_with_normalizer_and_parameters(
    compose_train: Callable, tiny_model: Path, tmp_path: Path, name: str
) -> None:
    model, tokenizer = built(compose_train, tiny_model, f"normalizer={name}", "T=0.5")
    for _, layer in attention_layers(model):
        for parameter in layer.normalizer.parameters():
            torch.nn.init.uniform_(parameter, 0.3, 0.9)
    backbone.save(model, tmp_path / "saved", tokenizer)
    reloaded = backbone.load(tmp_path / "saved")
    assert torch.equal(reloaded(TOKENS).logits, model.eval()(TOKENS).logits)
    assert reloaded.lm_head.weight is reloaded.transformer.wte.weight


def test_saved_directory_opens_without_this_package(
    compose_train: Callable, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokenizer = built(compose_train, tiny_model, "normalizer=ssmax")
    backbone.save(model, tmp_path / "saved", tokenizer)
    assert not any("normalizer" in key for key in load_file(tmp_path / "saved" / "model.safetensors"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert "UNEXPECTED" not in caplog.text
    assert plain.config._attn_implementation == "sdpa"
    original = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert torch.equal(plain(TOKENS).logits, original(TOKENS).logits)


def test_weights_are_float32_whatever_the_file_holds(compose_train: Callable, tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "half")
    AutoModelForCausalLM.from_pretrained(tiny_model).half().save_pretrained(tmp_path / "half")
    model, _ = built(compose_train, tmp_path / "half")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_shorter_context_keeps_the_pretrained_positions(compose_train: Callable, tiny_model: Path) -> None:
    model, _ = built(compose_train, tiny_model)
    original = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert torch.equal(model.transformer.wpe.weight, original.transformer.wpe.weight)


def test_missing_hub_model_is_one_line_of_advice(compose_train: Callable) -> None:
    with pytest.raises(ConfigError, match=r"model\.path=gpt2: .*local directory"):
        backbone.build(compose_train(["model=gpt2"]), corpus=[])


def test_model_without_tokenizer_is_refused(compose_train: Callable, tiny_model: Path, tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        shutil.copy(tiny_model / file, tmp_path / file)
    with pytest.raises(ConfigError, match=r"model\.path="):
        built(compose_train, tmp_path)


def test_dropout_option_reaches_every_layer(compose_train: Callable, tiny_model: Path) -> None:
    model, _ = built(compose_train, tiny_model, "model.dropout=0.25")
    rates = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
    assert rates == {0.25}
    assert model.config.attn_pdrop == 0.25


@pytest.mark.slow
def test_full_size_gpt2_loads_from_a_local_directory(compose_train: Callable, tmp_path: Path) -> None:
    """124M parameters at random, saved as a local directory; with GPT-2's own tokenizer where it is at hand."""
    from transformers import GPT2TokenizerFast

    GPT2LMHeadModel(GPT2Config()).save_pretrained(tmp_path)
    shared = PROJECT.parent / "shared" / "data" / "gpt2-tokenizer"
    if shared.is_dir():
        tokenizer = GPT2TokenizerFast.from_pretrained(shared)
        assert len(tokenizer) == 50257
        tokenizer.save_pretrained(tmp_path)
    else:
        backbone.train_tokenizer(["some words"], 300, 1024).save_pretrained(tmp_path)
    cfg = compose_train(["model=gpt2", f"model.path={tmp_path}", "normalizer=ssmax", "context_length=1024"])
    model, tokenizer = backbone.build(cfg, corpus=[])
    assert sum(p.numel() for p in model.parameters()) == 124_439_808 + 12 * 12
    if shared.is_dir():
        assert tokenizer("Hello world")["input_ids"] == [15496, 995]
    assert model(TOKENS).logits.shape == (1, 20, 50257)
