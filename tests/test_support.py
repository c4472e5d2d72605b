"""Checks the stand-ins for W&B's own tools, because other tests believe what these say about a run.

The reader of the offline record and the server are checked against each other as well: what `wandb sync` uploads from a
directory must be what the reader finds in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import wandb
from lightning.pytorch.loggers import WandbLogger
from support.wandb_record import read_run, read_runs
from support.wandb_server import WandbServer

LOSSES = [1 / (step + 1) for step in range(5)]
# The text does not fit two blocks of the record, so that one message is cut into first, middle and last chunk.
CONFIG = {"lr": 0.1, "model": {"dim": 4}, "text": "x" * 70_000}


@pytest.fixture(scope="module")
def offline_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was logged offline and failed."""
    directory = tmp_path_factory.mktemp("offline")
    # WandbLogger sets WANDB_MODE for the whole process; naming the variable here gets it restored.
    with wandb_session({**quiet_environment(directory), "WANDB_MODE": "offline"}):
        return log_run(directory, offline=True)


def test_record_holds_what_was_logged(offline_run: Path) -> None:
    record = read_run(offline_run)
    assert (record.project, record.name, record.tags) == ("project", "name", ("a", "b"))
    assert record.config == CONFIG
    assert [row["loss"] for row in record.history] == LOSSES
    assert [row["trainer/global_step"] for row in record.history] == list(range(5))
    assert record.metrics["*"] == "trainer/global_step"
    assert record.summary["loss"] == LOSSES[-1]
    assert record.exit_code == 1
    assert [run.run_id for run in read_runs(offline_run.parent)] == [record.run_id]


def test_truncated_record_yields_what_is_complete(offline_run: Path, tmp_path: Path) -> None:
    whole = read_run(offline_run)
    truncated = tmp_path / whole.path.name
    truncated.write_bytes(whole.path.read_bytes()[:-1])  # the exit status comes last
    record = read_run(truncated)
    assert record.exit_code is None
    assert record.history == whole.history


def test_sync_uploads_the_record(offline_run: Path, tmp_path: Path) -> None:
    record = read_run(offline_run)
    with WandbServer() as server:
        environment = {**os.environ, **quiet_environment(tmp_path), **server.environment()}
        # W&B writes its log below the working directory.
        command = [sys.executable, "-m", "wandb", "sync", str(offline_run)]
        subprocess.run(command, env=environment, cwd=tmp_path, check=True, timeout=60)
    uploaded = server.runs[record.run_id]
    assert server.problems == []
    assert uploaded["config"] == record.config
    assert uploaded["history"] == record.history
    assert uploaded["summary"] == record.summary
    assert (uploaded["name"], uploaded["tags"], uploaded["exit_code"]) == ("name", ("a", "b"), 1)
    assert "config.yaml" in uploaded["files"]


def test_online_run_reaches_the_server(tmp_path: Path) -> None:
    with WandbServer() as server, wandb_session({**quiet_environment(tmp_path), **server.environment()}):
        log_run(tmp_path, offline=False)
    (uploaded,) = server.runs.values()
    assert server.problems == []
    assert uploaded["config"] == CONFIG
    assert [row["loss"] for row in uploaded["history"]] == LOSSES
    assert uploaded["exit_code"] == 1


def log_run(directory: Path, offline: bool) -> Path:
    logger = WandbLogger(project="project", name="name", tags=["a", "b"], save_dir=directory, offline=offline)
    logger.log_hyperparams(CONFIG)
    for step, loss in enumerate(LOSSES):
        logger.log_metrics({"loss": loss}, step=step)
    run_directory = Path(logger.experiment.dir).parent
    wandb.finish(exit_code=1)
    return run_directory


def quiet_environment(directory: Path) -> dict[str, str]:
    """Keeps W&B from writing to the home directory and from reporting errors to its maker."""
    homes = dict.fromkeys(("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"), str(directory))
    return {**homes, "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}


@contextmanager
def wandb_session(environment: Mapping[str, str]) -> Iterator[None]:
    """Makes W&B read the environment anew: a process keeps the settings of its first run until `wandb.teardown`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        wandb.teardown()
        yield
        wandb.teardown()
