"""train() end to end on a tiny model: the run directory, its numbers, W&B's record, interruption and resume."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from lightning import Callback, LightningModule, Trainer
from omegaconf import OmegaConf
from support.wandb_record import finished_runs
from support.wandb_server import WandbServer

from attnlimits import backbone
from attnlimits.attention import attention_layers
from attnlimits.config import ConfigError


def rows(directory: Path) -> list[dict[str, str]]:
    with (directory / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def column(directory: Path, key: str) -> dict[int, str]:
    """Step to logged text; a step that was logged twice is a failure."""
    filled = [(int(row["step"]), row[key]) for row in rows(directory) if row.get(key)]
    assert len(dict(filled)) == len(filled), f"{key} was logged twice at a step"
    return dict(filled)


def test_run_directory_holds_what_the_readme_promises(run: Callable, capsys: pytest.CaptureFixture) -> None:
    result = run("normalizer=ssmax", "T=0.8", "trainer.max_steps=20", "optimizer.lr=3e-3")
    directory = result.directory
    names = {path.name for path in directory.iterdir()}
    files = {
        "config.yaml",
        "environment.json",
        "metrics.csv",
        "heads.parquet",
        "samples.jsonl",
        "extrapolation.csv",
        "summary.json",
    }
    assert names == files | {"checkpoints", "model", "tokenizer"}
    assert {path.name for path in (directory / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    saved = OmegaConf.load(directory / "config.yaml")
    assert (saved.T, saved.normalizer.name, saved.name) == (0.8, "ssmax", "ssmax-T0.8-L32")
    environment = json.loads((directory / "environment.json").read_text())
    assert environment["packages"]["torch"].startswith(torch.__version__.split("+")[0])
    assert {"command", "git", "cpu", "gpus"} <= set(environment)
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["exit_reason"] == "completed"
    assert summary["steps"] == 20
    assert summary["tokens"] == 20 * 4 * 32
    assert len(summary["text"]["train_sha256"]) == 64
    assert summary["val/loss"] == summary["after"]["val/loss"] < summary["before"]["val/loss"]
    printed = capsys.readouterr().out
    for part in ("before", "after", "perplexity", "tokens/s", "checkpoints/last.ckpt", "step 20/20"):
        assert part in printed


def test_metrics_have_one_row_a_step_and_start_before_training(run: Callable) -> None:
    directory = run("trainer.accumulate=3", "trainer.max_steps=5", "trainer.validate_every=2").directory
    assert list(column(directory, "train/loss")) == [1, 2, 3, 4, 5]
    assert list(column(directory, "train/tokens_per_second")) == [1, 2, 3, 4, 5]
    assert list(column(directory, "val/loss")) == [0, 2, 4, 5]


def test_first_validation_is_the_pretrained_model(run: Callable, tiny_model: Path) -> None:
    result = run("trainer.validation_blocks=null")
    model = backbone.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    blocks = result.module.trainer.datamodule.validation
    tokens = blocks.batch(range(len(blocks)))
    with torch.no_grad():
        log_probabilities = model(tokens[:, :-1]).logits.double().log_softmax(-1)
    expected = -log_probabilities.gather(-1, tokens[:, 1:, None]).mean().item()
    assert result.summary["before"]["val/loss"] == pytest.approx(expected, rel=1e-6)


def test_perplexity_does_not_depend_on_the_validation_batch_size(run: Callable) -> None:
    results = [run(f"data.validation_batch_size={size}", directory=str(size)).summary["before"] for size in (1, 7)]
    assert results[0]["val/perplexity"] == pytest.approx(results[1]["val/perplexity"], rel=1e-5)


def test_accumulation_equals_the_large_batch(run: Callable) -> None:
    """Two micro-batches of 2 are one batch of 4: the same order, the same mean, so the same weights."""
    plain = run("model.dropout=0", directory="plain").module
    accumulated = run("model.dropout=0", "data.batch_size=2", "trainer.accumulate=2", directory="accumulated").module
    for expected, actual in zip(plain.parameters(), accumulated.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-6, rtol=1e-4)


def test_backbone_trains_in_train_mode_and_validates_in_eval_mode(
    run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnlimits.module import LanguageModel

    modes: dict[str, set[bool]] = {"training_step": set(), "validation_step": set()}
    for step in modes:
        original = getattr(LanguageModel, step)

        def spied(self: LanguageModel, *args: Any, _step: str = step, _original: Any = original) -> Any:
            modes[_step] |= {module.training for module in self.backbone.modules()}
            return _original(self, *args)

        monkeypatch.setattr(LanguageModel, step, spied)
    run()
    assert modes == {"training_step": {True}, "validation_step": {False}}


def test_best_model_directory_is_the_best_checkpoint(run: Callable) -> None:
    directory = run("normalizer=ssmax", "T=0.5").directory
    tokens = torch.arange(20)[None] % 7
    from_directory = backbone.load(directory / "model")
    from_checkpoint = backbone.load(directory / "checkpoints" / "best.ckpt")
    assert torch.equal(from_directory(tokens).logits, from_checkpoint(tokens).logits)
    assert [layer.normalizer.T for _, layer in attention_layers(from_directory)] == [0.5, 0.5]


@pytest.mark.parametrize("precision", ["32", "bf16-mixed"])
def test_same_seed_same_run_and_zero_is_a_seed(run: Callable, precision: str) -> None:
    runs = [run("seed=0", f"trainer.precision={precision}", directory=f"{i}").directory for i in range(2)]
    assert column(runs[0], "train/loss") == column(runs[1], "train/loss")
    other = run("seed=1", f"trainer.precision={precision}", directory="other").directory
    assert column(other, "train/loss") != column(runs[0], "train/loss")


def test_unseeded_run_says_so(run: Callable, capsys: pytest.CaptureFixture) -> None:
    run("seed=null", "trainer.max_steps=1")
    assert "seed=null: this run is unseeded" in capsys.readouterr().out


def test_epochs_are_passes_over_the_blocks(run: Callable) -> None:
    result = run("trainer.max_steps=null", "trainer.max_epochs=1")
    n_blocks = len(result.module.trainer.datamodule.train)
    assert result.summary["steps"] == -(-n_blocks // 4)


# ------------------------------------------------------------------------------------------------ resume


class StopAt(Callback):
    """Ctrl-C in the middle of an optimizer step."""

    def __init__(self, *, step: int, number: int = signal.SIGINT) -> None:
        self.step, self.number, self.done = step, number, False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and not self.done:
            self.done = True
            os.kill(os.getpid(), self.number)


def final_state(directory: Path) -> dict[str, Any]:
    return torch.load(directory / "checkpoints" / "last.ckpt", weights_only=True)


def assert_same_training_state(first: Path, second: Path) -> None:
    a, b = final_state(first), final_state(second)
    assert a["global_step"] == b["global_step"]
    for key, value in a["state_dict"].items():
        assert torch.equal(value, b["state_dict"][key]), key
    for x, y in zip(_tensors(a["optimizer_states"]), _tensors(b["optimizer_states"]), strict=True):
        assert torch.equal(x, y)
    assert a["lr_schedulers"] == b["lr_schedulers"]


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else []
    return [leaf for child in children for leaf in _tensors(child)]


@pytest.mark.parametrize(
    "options", [(), ("trainer.accumulate=2", "trainer.validate_every=2")], ids=["plain", "accumulate, validate between"]
)
def test_five_and_five_steps_equal_ten_bit_for_bit(run: Callable, options: tuple[str, ...]) -> None:
    base = ("normalizer=ssmax", "model.dropout=0.1", "optimizer.schedule_steps=10", *options)
    straight = run(*base, "trainer.max_steps=10", directory="straight").directory
    half = run(*base, "trainer.max_steps=5", directory="half").directory
    result = run(f"ckpt_path={half}/checkpoints/last.ckpt", "trainer.max_steps=10", directory="half")
    resumed = result.directory
    assert result.summary["tokens"] == json.loads((straight / "summary.json").read_text())["tokens"]
    assert_same_training_state(straight, resumed)
    assert column(straight, "train/loss") == column(resumed, "train/loss")
    assert list(column(resumed, "train/loss")) == list(range(1, 11))


def test_unseeded_run_resumes_in_its_own_order_of_data(run: Callable) -> None:
    half = run("seed=null", "trainer.max_steps=2").directory
    (before,) = final_state(half)["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    run(f"ckpt_path={half}/checkpoints/last.ckpt", "trainer.max_steps=4")
    (after,) = final_state(half)["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert (before["next_batch"], after["next_batch"]) == (2, 4)
    assert before["seed"] == after["seed"]


@pytest.mark.parametrize(
    ("number", "accumulate", "step", "saved"),
    [(signal.SIGINT, 1, 4, 5), (signal.SIGTERM, 1, 4, 5), (signal.SIGINT, 2, 4, 5), (signal.SIGINT, 1, 3, 3)],
    ids=["Ctrl-C", "SIGTERM", "while accumulating", "just saved"],
)
def test_interrupted_run_keeps_its_step_and_resumes_bit_for_bit(
    run: Callable, number: int, accumulate: int, step: int, saved: int, capsys: pytest.CaptureFixture
) -> None:
    every = f"trainer.accumulate={accumulate}"
    straight = run("trainer.max_steps=6", every, directory="straight").directory
    stop = f"+callbacks.stop={{_target_:test_training.StopAt,step:{step},number:{int(number)}}}"
    with pytest.raises(SystemExit) as exit_:
        run("trainer.max_steps=6", every, stop, directory="stopped")
    assert exit_.value.code == 130
    stopped = straight.parent / "stopped"
    assert json.loads((stopped / "summary.json").read_text())["exit_reason"] == "interrupted"
    assert final_state(stopped)["global_step"] == saved
    assert f"ckpt_path={stopped}/checkpoints/last.ckpt" in capsys.readouterr().out
    run(f"ckpt_path={stopped}/checkpoints/last.ckpt", "+callbacks.stop.step=-1", directory="stopped")
    assert_same_training_state(straight, stopped)
    assert column(straight, "train/loss") == column(stopped, "train/loss")
    assert column(straight, "val/loss") == column(stopped, "val/loss")


def test_resume_needs_neither_the_models_source_nor_a_tokenizer_elsewhere(
    run: Callable, tiny_model: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "moved"
    shutil.copytree(tiny_model, copy)
    half = run(f"model.path={copy}", "trainer.max_steps=2").directory
    shutil.rmtree(copy)
    assert run(f"ckpt_path={half}/checkpoints/last.ckpt", "trainer.max_steps=3").summary["steps"] == 3


def test_resume_refuses_what_would_make_it_another_run(run: Callable) -> None:
    half = run("trainer.max_steps=2").directory
    for override in ("normalizer=sparsemax", "T=0.5", "context_length=16", "optimizer.lr=1"):
        with pytest.raises(ConfigError, match=f"^{override}: a resumed run keeps"):
            run(f"ckpt_path={half}/checkpoints/last.ckpt", override)


# --------------------------------------------------------------------------------------------------- W&B


def fresh_wandb() -> None:
    """W&B reads its environment once a process."""
    wandb.teardown()


def test_offline_record_holds_config_and_history(run: Callable) -> None:
    fresh_wandb()
    directory = run("logger=wandb", "normalizer=sparsemax", "T=0.5", "logger.tags=[mine]").directory
    (record,) = finished_runs(directory / "wandb")
    assert record.name == "sparsemax-T0.5-L32"
    assert set(record.tags) == {"sparsemax", "T=0.5", "L=32", "mine"}
    assert record.config["normalizer"] == {"name": "sparsemax"}
    assert record.exit_code == 0
    assert record.metrics["*"] == "trainer/global_step"
    for key in ("train/loss", "val/loss", "val/perplexity", "train/lr", "train/tokens_per_second"):
        logged = {str(int(row["trainer/global_step"])): row[key] for row in record.history if key in row}
        written = {str(step): float(text) for step, text in column(directory, key).items()}
        assert logged == pytest.approx(written), key


def test_offline_record_syncs_to_a_server(run: Callable, tmp_path: Path) -> None:
    fresh_wandb()
    directory = run("logger=wandb").directory
    (record,) = finished_runs(directory / "wandb")
    (offline,) = (directory / "wandb").glob("offline-run-*")
    with WandbServer() as server:
        environment = {**os.environ, **server.environment()}
        command = [sys.executable, "-m", "wandb", "sync", str(offline)]
        subprocess.run(command, env=environment, cwd=tmp_path, check=True, timeout=120, capture_output=True)
    assert server.problems == []
    uploaded = server.runs[record.run_id]
    assert uploaded["history"] == record.history
    assert uploaded["config"] == record.config
    assert (uploaded["name"], uploaded["exit_code"]) == ("softmax-T1.0-L32", 0)


class Fail(Callback):
    """A bug in the third step."""

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            raise RuntimeError("the third step")


def test_failed_run_is_finished_with_exit_code_1(run: Callable, tmp_path: Path) -> None:
    fresh_wandb()
    with pytest.raises(RuntimeError, match="the third step"):
        run("logger=wandb", "+callbacks.fail={_target_:test_training.Fail}")
    (record,) = finished_runs(tmp_path / "run" / "wandb")
    assert record.exit_code == 1
    assert "the third step" in json.loads((tmp_path / "run" / "summary.json").read_text())["exit_reason"]
    assert list(column(tmp_path / "run", "train/loss")) == [1, 2]


def test_resumed_run_goes_on_in_the_same_wandb_run(run: Callable) -> None:
    fresh_wandb()
    half = run("logger=wandb", "trainer.max_steps=2").directory
    run(f"ckpt_path={half}/checkpoints/last.ckpt", "trainer.max_steps=4", "logger.kind=wandb")
    records = finished_runs(half / "wandb")
    assert len(records) == 2
    assert len({record.run_id for record in records}) == 1
    steps = [row["trainer/global_step"] for record in records for row in record.history if "train/loss" in row]
    assert steps == [1, 2, 3, 4]


def test_two_runs_in_one_process_are_two_wandb_runs(run: Callable) -> None:
    fresh_wandb()
    ids = set()
    for T in ("0.5", "1"):
        (record,) = finished_runs(run("logger=wandb", f"T={T}", "trainer.max_steps=1", directory=T).directory / "wandb")
        ids.add(record.run_id)
        assert record.config["T"] == float(T)
    assert len(ids) == 2


def test_online_run_reaches_the_server(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_wandb()
    with WandbServer() as server:
        for key, value in server.environment().items():
            monkeypatch.setenv(key, value)
        run("logger=wandb_online")
        fresh_wandb()
        (record,) = server.runs.values()
    assert record["exit_code"] == 0
    assert [row["trainer/global_step"] for row in record["history"] if "train/loss" in row] == [1, 2, 3, 4, 5, 6]


def test_tensorboard_writes_beside_the_csv(run: Callable) -> None:
    directory = run("logger=tensorboard").directory
    assert list((directory / "tensorboard").glob("events.*"))
    assert column(directory, "val/loss")
