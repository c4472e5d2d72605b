"""Where metrics go: metrics.csv in the run directory always, and W&B or TensorBoard beside it."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from lightning.fabric.loggers.csv_logs import _ExperimentWriter
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig
from torch import Tensor

from .config import ConfigError, plain
from .figures import heatmap
from .metrics.verdict import VERDICTS


def make_loggers(cfg: DictConfig, directory: Path, *, resumed_step: int | None = None) -> list[Logger]:
    """The loggers of a run. W&B is started here, so that a refusal comes before training starts.

    Args:
        cfg: the composed conf/train.yaml.
        directory: of the run.
        resumed_step: optimizer step from which the run goes on; rows of metrics.csv after it are dropped.
    """
    loggers: list[Logger] = [MetricsFile(directory, keep_until=resumed_step)]
    if cfg.logger.kind == "wandb":
        loggers.append(_wandb(cfg, directory))
    elif cfg.logger.kind == "tensorboard":
        loggers.append(_tensorboard(directory))
    return loggers


def log_scalars(loggers: Sequence[Logger], scalars: Mapping[str, float], step: int) -> None:
    """Numbers by key to every logger, x = ``step`` optimizer steps done."""
    for logger in loggers:
        logger.log_metrics(dict(scalars), step=step)


def layer_means(key: str, values_LxH: Tensor) -> dict[str, float]:
    """``key`` (mean over layers and heads) and ``key/layer_07`` (over its heads); NaN is left out of a mean."""
    by_layer = {f"{key}/layer_{layer:02d}": row.nanmean().item() for layer, row in enumerate(values_LxH)}
    return {key: values_LxH.nanmean().item(), **by_layer}


def log_heads(loggers: Sequence[Logger], heads: Mapping[str, Tensor], step: int) -> None:
    """Values of every head, (layers, H) by metric, to heads.parquet: a row is a step, a layer and a head.

    What a resumed run measures anew replaces what was there.
    """
    table = heads_table(heads, step)
    path = run_directory(loggers) / "heads.parquet"
    if path.is_file():
        earlier = pd.read_parquet(path)
        table = pd.concat([earlier[earlier["step"] < step], table], ignore_index=True)
    table.to_parquet(path.with_suffix(".part"), index=False)
    path.with_suffix(".part").replace(path)


def heads_table(heads: Mapping[str, Tensor], step: int) -> pd.DataFrame:
    """One row a head: step, layer, head, and a column a metric; verdicts as words."""
    n_layers, n_heads = next(iter(heads.values())).shape
    layer, head = (index.ravel() for index in np.indices((n_layers, n_heads)))
    columns: dict[str, Any] = {name: values.flatten().numpy() for name, values in heads.items()}
    columns["verdict"] = [VERDICTS[int(index)] for index in columns["verdict"]]
    return pd.DataFrame({"step": step, "layer": layer, "head": head, **columns})


def draw_heads(loggers: Sequence[Logger], heads: Mapping[str, Tensor], step: int, names: Sequence[str]) -> None:
    """The same values to W&B: one table of all, and a heatmap (layers x heads) of each of ``names``."""
    import wandb

    for logger in loggers:
        if isinstance(logger, WandbLogger):
            pictures = {f"heads/{name}": wandb.Image(heatmap(heads[name], name)) for name in names if name in heads}
            table = wandb.Table(dataframe=heads_table(heads, step))
            logger.experiment.log({"heads/table": table, **pictures, "trainer/global_step": step})


def log_analysis(loggers: Sequence[Logger], tables: Mapping[str, pd.DataFrame], directory: Path) -> None:
    """An analysis to W&B: its figures, its tables, and the files of all tables as an artifact.

    ``results``, which has a row a head and number, is in the artifact alone.
    """
    import wandb

    for logger in loggers:
        if isinstance(logger, WandbLogger):
            pictures = {
                f"analysis/{path.stem}": wandb.Image(str(path)) for path in (directory / "figures").glob("*.png")
            }
            shown = {
                f"analysis/{name}_table": wandb.Table(dataframe=_plain_columns(table))
                for name, table in tables.items()
                if name != "results"
            }
            logger.experiment.log({**pictures, **shown})
            artifact = wandb.Artifact(f"analysis-{logger.experiment.id}", type="analysis")
            artifact.add_dir(str(directory / "tables"))
            logger.experiment.log_artifact(artifact)


def _plain_columns(table: pd.DataFrame) -> pd.DataFrame:
    """Numbers that may be missing as floats: W&B knows no pandas.NA."""
    nullable = [name for name in table.columns if str(table[name].dtype) == "Int64"]
    return table.astype(dict.fromkeys(nullable, float))


def run_directory(loggers: Sequence[Logger]) -> Path:
    """Where the run's own files lie: where its metrics.csv does."""
    (metrics,) = (logger for logger in loggers if isinstance(logger, MetricsFile))
    return Path(metrics.log_dir)


def finish(loggers: list[Logger], exit_code: int) -> None:
    """Close what outlives a Trainer: the W&B run, with the exit code of the job."""
    for logger in loggers:
        if isinstance(logger, WandbLogger) and is_first_process():
            logger.experiment.finish(exit_code=exit_code)
            # WandbLogger sets it for good; the next run in this process may be online.
            os.environ.pop("WANDB_MODE", None)


def is_first_process() -> bool:
    """Rank 0, known before a Trainer exists: a launched process finds its rank in the environment."""
    return os.environ.get("LOCAL_RANK", "0") == "0" and os.environ.get("RANK", "0") == "0"


class MetricsFile(CSVLogger):
    """``metrics.csv`` straight in the run directory; a resumed run appends to it.

    Args:
        directory: of the run.
        keep_until: keep the rows of an earlier part of the run up to this step; None = start anew.
    """

    def __init__(self, directory: Path, *, keep_until: int | None = None) -> None:
        super().__init__(save_dir=directory, name="", version="")
        self._keep_until = keep_until

    @property
    def log_dir(self) -> str:
        return str(self.save_dir)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._experiment is None:
            self._experiment = _MetricsWriter(self.log_dir, self._keep_until)
        return self._experiment

    @rank_zero_only
    def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        """config.yaml has them."""


class _MetricsWriter(_ExperimentWriter):
    def __init__(self, log_dir: str, keep_until: int | None) -> None:
        super().__init__(log_dir)
        path = Path(self.metrics_file_path)
        if keep_until is None:
            path.unlink(missing_ok=True)
        elif path.is_file():
            with path.open(newline="") as file:
                reader = csv.DictReader(file)
                rows = [row for row in reader if int(row["step"]) <= keep_until]
                self.metrics_keys = list(reader.fieldnames or [])
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, self.metrics_keys)
                writer.writeheader()
                writer.writerows(rows)

    def _check_log_dir_exists(self) -> None:
        """The run directory is never empty, and what it holds stays."""


def _wandb(cfg: DictConfig, directory: Path) -> WandbLogger:
    import wandb

    tags = [cfg.normalizer.name, f"T={cfg.T:g}", f"L={cfg.context_length}", *cfg.logger.tags]
    logger = WandbLogger(
        name=cfg.name,
        save_dir=directory,
        offline=cfg.logger.offline,
        project=cfg.logger.project,
        entity=cfg.logger.entity,
        group=cfg.logger.group,
        id=_earlier_wandb_id(directory),
        tags=tags,
        config=plain(cfg),
        # The mode is said here, for W&B reads its environment once a process, and an earlier run may have been offline.
        settings=wandb.Settings(silent=True, console="off", mode="offline" if cfg.logger.offline else "online"),
    )
    # Lightning hands on a setting that W&B has dropped and warns of at every start.
    logger._wandb_init.pop("anonymous", None)
    if is_first_process():
        try:
            _ = logger.experiment
        except (wandb.errors.UsageError, wandb.errors.CommError) as error:
            line = str(error).strip().split("\n")[0]
            advice = "run `wandb login`, or use logger=wandb"
            raise ConfigError(f"logger.offline={cfg.logger.offline}: W&B cannot start ({line}); {advice}") from error
    return logger


def _earlier_wandb_id(directory: Path) -> str | None:
    """The W&B run that an earlier part of this run directory wrote to, from its record run-<id>.wandb."""
    records = sorted((directory / "wandb").glob("*run-*/run-*.wandb"))
    return records[-1].stem.removeprefix("run-") if records else None


def _tensorboard(directory: Path) -> TensorBoardLogger:
    try:
        return TensorBoardLogger(save_dir=directory, name="tensorboard", version="")
    except ModuleNotFoundError as error:
        raise ConfigError("logger.kind=tensorboard: needs the package tensorboard (pip install tensorboard)") from error
