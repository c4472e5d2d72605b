"""--multirun: every job its own run, failures apart, and the same command again does only what is missing."""

from __future__ import annotations

import fcntl
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import train as train_script
from attnlimits import cli
from attnlimits.config import TrainConfig

Launch = Callable[..., int]


@pytest.fixture
def launch(tmp_path: Path, tiny_model: Path, novel: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Runs ``train.py --multirun`` on a tiny model; returns the exit code."""
    monkeypatch.chdir(tmp_path)
    common = [f"model.path={tiny_model}", "data=text", f"data.path={novel}", f"data.cache_dir={tmp_path / 'cache'}"]
    common += [
        "logger=csv",
        "callbacks=none",
        "trainer.max_steps=2",
        "trainer.validation_blocks=2",
        "data.batch_size=2",
    ]

    def launch(*overrides: str) -> int:
        length = () if any("context_length" in override for override in overrides) else ("context_length=16",)
        monkeypatch.setattr(sys, "argv", ["train.py", "--multirun", *common, *length, *overrides])
        try:
            cli.launch(train_script.main, TrainConfig)
        except SystemExit as error:
            return error.code if isinstance(error.code, int) else 1
        return 0

    return launch


def sweeps() -> list[Path]:
    return sorted(path.parent for path in Path("outputs").glob("*/*/sweep.json"))


def reasons(directory: Path) -> list[str]:
    return [json.loads(path.read_text())["exit_reason"] for path in sorted(directory.glob("*/summary.json"))]


def started(directory: Path) -> list[int]:
    """When each job's environment.json was written: it changes if a job is run again."""
    return [path.stat().st_mtime_ns for path in sorted(directory.glob("*/environment.json"))]


def test_the_same_command_again_runs_no_job_twice(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("normalizer=softmax,sparsemax", "T=0.5,1")
    assert launch(*command) == 0
    (directory,) = sweeps()
    before = started(directory)
    assert reasons(directory) == ["completed"] * 4
    assert launch(*command, "sweep.resume=true") == 0
    assert sweeps() == [directory]
    assert started(directory) == before
    assert "4 of 4 jobs completed" in capsys.readouterr().out


def test_other_jobs_and_resume_false_start_their_own_sweep(launch: Launch) -> None:
    assert launch("T=0.5,1") == 0
    assert launch("T=0.5,1", "optimizer.lr=1e-4") == 0
    assert launch("T=0.5,1", "sweep.resume=false") == 0
    assert [len(reasons(directory)) for directory in sweeps()] == [2, 2, 2]


def test_a_failed_job_is_told_and_the_others_go_on(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("context_length=100000,16") == 1
    (directory,) = sweeps()
    failed, completed = reasons(directory)
    assert failed.startswith("failed: context_length=100000")
    assert completed == "completed"
    assert "ConfigError" in next(directory.glob("0-*/traceback.txt")).read_text()
    out = capsys.readouterr().out
    assert "1 of 2 jobs completed" in out
    assert "context_length=100000" in out.rsplit("jobs completed", 1)[1]


def test_a_half_done_job_goes_on_from_its_checkpoint(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("T=0.5,1") == 0
    (directory,) = sweeps()
    (job,) = directory.glob("1-*")
    before = (job / "summary.json").read_text()
    (job / "summary.json").unlink()  # as if the machine had gone down after the last checkpoint
    capsys.readouterr()
    assert launch("T=0.5,1") == 0
    assert "1 of 2 jobs completed" in capsys.readouterr().out
    now = json.loads((job / "summary.json").read_text())
    assert now["val/loss"] == pytest.approx(json.loads(before)["val/loss"], abs=1e-6)
    assert reasons(directory) == ["completed"] * 2


def test_a_sweep_that_another_process_runs_is_left_alone(launch: Launch) -> None:
    assert launch("T=0.5,1") == 0
    (directory,) = sweeps()
    with (directory / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert launch("T=0.5,1") == 0
    assert len(sweeps()) == 2


@pytest.mark.parametrize("wrong", ["T=0.5,abc", "normalizer=softmax,nope", "nope=1,2"])
def test_a_mistake_in_one_job_is_refused_before_any_has_run(
    launch: Launch, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    assert launch(wrong) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not sweeps()
