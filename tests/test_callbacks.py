"""What the measuring callbacks log, where, and that a run does not notice them."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import PROJECT
from lightning import Callback, LightningModule, Trainer
from support.wandb_record import finished_runs
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnlimits.callbacks.gradient_norms import parameter_groups
from attnlimits.config import ConfigError
from attnlimits.metrics.catalogue import generic, keys, markdown
from attnlimits.metrics.verdict import VERDICTS


def columns(directory: Path) -> dict[str, dict[int, float]]:
    """Key to step to value; a key that was logged twice at a step is a failure."""
    found: dict[str, dict[int, float]] = {}
    with (directory / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            for key, text in row.items():
                if text and key != "step":
                    values = found.setdefault(key, {})
                    assert int(row["step"]) not in values, f"{key} was logged twice at step {row['step']}"
                    values[int(row["step"])] = float(text)
    return found


def test_docs_are_what_the_catalogue_says() -> None:
    assert (PROJECT / "docs" / "metrics.md").read_text(encoding="utf-8") == markdown()


def test_default_run_logs_every_documented_key_everywhere(run: Callable) -> None:
    """ssmax has something to learn; N = 20 needs rows of more than 20 keys."""
    directory = run("logger=wandb", "normalizer=ssmax").directory
    logged = columns(directory)
    assert {generic(key) for key in logged} == keys()
    (record,) = finished_runs(directory / "wandb")
    in_wandb = {key: row for row in record.history for key in row}
    assert set(logged) <= set(in_wandb)
    heatmaps = {key for key in in_wandb if key.startswith("heads/")}
    assert {"heads/table", "heads/entropy", "heads/separability_n5"} <= heatmaps
    for key, values in logged.items():
        rows = [row for row in record.history if key in row]
        assert {int(row["trainer/global_step"]): row[key] for row in rows} == pytest.approx(values, nan_ok=True)


def test_steps_of_every_callback(run: Callable) -> None:
    every = ("callbacks.attention_probe.every_n_steps=2", "callbacks.gradient_norms.every_n_steps=2")
    logged = columns(run(*every, "trainer.accumulate=2", "normalizer=sink").directory)
    assert list(logged["attention/entropy"]) == [0, 2, 3, 4, 6]  # and at each validation: 0, 3, 6
    assert list(logged["gradients/norm"]) == [2, 4, 6]
    assert list(logged["normalizer/sigma"]) == [0, 5]
    assert logged["normalizer/sigma"][0] == -10.0


def test_heads_file_holds_every_head_and_its_means_are_the_scalars(run: Callable) -> None:
    directory = run().directory
    table, logged = pd.read_parquet(directory / "heads.parquet"), columns(directory)
    assert list(table.columns[:3]) == ["step", "layer", "head"]
    assert table.groupby("step").size().to_dict() == {0: 4, 3: 4, 6: 4}
    assert set(table["verdict"]) <= set(VERDICTS)
    for name in ("entropy", "separability_n5", "jacobian_norm", "logit_gradient"):
        assert table.groupby("step")[name].mean().to_dict() == pytest.approx(logged[f"attention/{name}"])
    second = table[(table["step"] == 6) & (table["layer"] == 1)]
    assert second["entropy"].mean() == pytest.approx(logged["attention/entropy/layer_01"][6])


def test_training_with_and_without_measuring_is_bit_identical(run: Callable) -> None:
    """Dropout is on, so that a random number drawn by a callback would show."""
    every = [f"callbacks.{name}.every_n_steps=1" for name in ("attention_probe", "gradient_norms")]
    measured = run("model.dropout=0.1", *every, directory="measured").module.state_dict()
    plain = run("model.dropout=0.1", "callbacks=none", directory="plain").module.state_dict()
    assert all(torch.equal(measured[key], plain[key]) for key in plain)


def test_resumed_run_measures_as_if_it_had_not_stopped(run: Callable) -> None:
    whole = run(directory="whole").directory
    half = run("trainer.max_steps=3", "optimizer.schedule_steps=6", directory="half").directory
    run(f"ckpt_path={half / 'checkpoints' / 'last.ckpt'}", "trainer.max_steps=6", directory="half")
    for key, values in columns(whole).items():
        if key.startswith(("attention/", "gradients/")):
            assert columns(half)[key] == values, key
    pd.testing.assert_frame_equal(pd.read_parquet(half / "heads.parquet"), pd.read_parquet(whole / "heads.parquet"))
    texts = [(directory / "samples.jsonl").read_text() for directory in (whole, half)]
    assert texts[0] == texts[1]


class SeesGradients(Callback):
    """The gradient before and after clipping, as the optimizer meets it."""

    def __init__(self) -> None:
        self.before: list[float] = []
        self.after: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        self.before.append(total_norm(module))

    def on_before_zero_grad(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        if any(p.grad is not None for p in module.parameters()):
            self.after.append(total_norm(module))


def total_norm(module: LightningModule) -> float:
    return math.sqrt(sum(p.grad.double().square().sum().item() for p in module.parameters() if p.grad is not None))


def test_gradient_norms_before_and_after_clipping(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = SeesGradients()
    monkeypatch.setattr("attnlimits.training.RandomState", lambda: seen)  # a place among the callbacks
    logged = columns(
        run("trainer.clip=0.5", "trainer.accumulate=2", "callbacks.gradient_norms.every_n_steps=1").directory
    )
    assert list(logged["gradients/norm"].values()) == pytest.approx(seen.before, rel=1e-5)
    assert min(seen.before) > 0.5  # or nothing was clipped and nothing shown
    assert len(seen.after) >= 4
    for clipped in (*logged["gradients/norm_clipped"].values(), *seen.after):
        assert clipped == pytest.approx(0.5, rel=1e-4)
    kinds = [
        key for key in logged if key in {f"gradients/{kind}" for kind in ("attention", "mlp", "embeddings", "other")}
    ]
    for step, norm in logged["gradients/norm"].items():
        assert math.sqrt(sum(logged[key][step] ** 2 for key in kinds)) == pytest.approx(norm, rel=1e-5)


def test_every_parameter_is_of_one_kind_and_blocks_have_their_layer(run: Callable) -> None:
    model = run("normalizer=sink", "trainer.max_steps=1").module.backbone
    groups = parameter_groups(model)
    assert len(groups["normalizer"]) == 2
    assert len(groups["embeddings"]) == 2
    kinds = [id(p) for kind in ("attention", "mlp", "embeddings", "normalizer", "other") for p in groups[kind]]
    assert sorted(kinds) == sorted(id(p) for p in groups["norm"])
    assert len(groups["layer_00"]) == len(groups["layer_01"]) == 13


@pytest.mark.parametrize(
    "override",
    ["attention_probe.rows=0", "attention_probe.top_n=[]", "gradient_norms.every_n_steps=0", "samples.new_tokens=0"],
)
def test_wrong_option_is_one_line(run: Callable, override: str) -> None:
    name = override.split("=")[0]
    with pytest.raises(ConfigError, match=rf"callbacks\.{name.split('.')[0]}.*{name.split('.')[1]}"):
        run(f"callbacks.{override}")


@pytest.fixture
def blind_model(tiny_model: Path, tmp_path: Path) -> Path:
    """Queries are zero: every logit is."""
    path = tmp_path / "blind"
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    for block in model.transformer.h:
        block.attn.c_attn.weight.data[:, :32] = 0.0
        block.attn.c_attn.bias.data[:32] = 0.0
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(path)
    return path


def test_run_with_constant_logits_vanishes_as_one_over_n(run: Callable, blind_model: Path) -> None:
    """Entropy is ln n, the largest weight 1/n, and a softmax of n equal logits has the Jacobian norm 1/n / T."""
    logged = columns(run(f"model.path={blind_model}", "T=0.5", "trainer.max_steps=1").directory)
    at_start = {key: values[0] for key, values in logged.items() if 0 in values}
    assert at_start["attention/entropy"] == pytest.approx(1.0, abs=1e-6)
    assert at_start["attention/max_weight_slope"] == pytest.approx(-1.0, abs=1e-6)
    assert at_start["attention/max_weight_times_n"] == pytest.approx(1.0, abs=1e-6)
    assert at_start["attention/verdict_vanishing"] == 1.0
    norms = [0.0, *(1 / n for n in range(2, 33))]
    assert at_start["attention/jacobian_norm"] == pytest.approx(2 * sum(norms) / 32, abs=1e-6)


def test_run_with_sparsemax_shows_zeros_and_norm_one_over_T(run: Callable) -> None:
    logged = columns(run("normalizer=sparsemax", "T=0.05", "trainer.max_steps=1").directory)
    assert logged["attention/zeros"][0] > 0
    assert logged["attention/jacobian_norm_max"][0] == pytest.approx(20.0, rel=1e-6)
    assert logged["attention/jacobian_vs_published"][0] > 1
