"""Around the work of train.py and analyze.py: silence the libraries, open a run and close it with its exit code."""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig
from transformers.utils import logging as transformers_logging

from . import loggers, rundir
from .config import ConfigError

INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C ended


def quiet() -> None:
    """Progress lines and errors are ours; of the libraries only what may matter."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*(isinstance\\(treespec|LeafSpec).*")
    warnings.filterwarnings("ignore", message=".*srun.*")
    warnings.filterwarnings("ignore", message=".*sync_dist=True.*")  # what is logged is reduced already
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("WANDB_SILENT", "true")


@contextmanager
def open_run(
    cfg: DictConfig, directory: Path, *, resumed_step: int | None = None, advice: Callable[[], str] = lambda: ""
) -> Iterator[list[Logger]]:
    """Open the run directory and its loggers; close them with the exit code of whatever happened.

    Args:
        cfg: of the run; written to config.yaml.
        directory: of the run.
        resumed_step: optimizer step from which it goes on, if it does.
        advice: what to add to "interrupted".

    Raises:
        SystemExit: 130, the run was interrupted.
    """
    fresh = not (directory / "config.yaml").is_file()
    try:
        run_loggers = loggers.make_loggers(cfg, directory, resumed_step=resumed_step)
    except ConfigError:
        if fresh:
            shutil.rmtree(directory / "wandb", ignore_errors=True)
        raise
    try:
        rundir.write_config(directory, cfg)
        rundir.write_json(directory / "environment.json", rundir.environment())
        yield run_loggers
    except KeyboardInterrupt:
        rundir.write_json(directory / "summary.json", {"exit_reason": "interrupted"})
        print(f"interrupted{advice()}")
        loggers.finish(run_loggers, INTERRUPTED)
        raise SystemExit(INTERRUPTED) from None
    except BaseException as error:
        rundir.write_json(directory / "summary.json", {"exit_reason": f"failed: {type(error).__name__}: {error}"})
        loggers.finish(run_loggers, 1)
        raise
    loggers.finish(run_loggers, 0)
