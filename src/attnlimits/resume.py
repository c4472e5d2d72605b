"""Going on where a run stopped: its own configuration, with what may change changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .config import ConfigError, TrainConfig

MAY_CHANGE = (
    *("trainer.", "logger.", "callbacks.", "compile"),
    *("optimizer.schedule_steps", "data.cache_dir", "data.validation_batch_size"),
)


def resumed_config(ckpt_path: str, overrides: Sequence[str]) -> DictConfig:
    """The config.yaml of the checkpoint's run, with the overrides of this command line.

    Raises:
        ConfigError: no such checkpoint, a run without config.yaml, or an override would make it another run.
    """
    if not Path(ckpt_path).is_file():
        raise ConfigError(f"ckpt_path={ckpt_path}: no such file; give a checkpoints/last.ckpt of a run, or null")
    saved = Path(ckpt_path).resolve().parents[1] / "config.yaml"
    if not saved.is_file():
        raise ConfigError(f"ckpt_path={ckpt_path}: {saved} is missing; a run resumes from its own run directory")
    cfg = OmegaConf.merge(OmegaConf.structured(TrainConfig), OmegaConf.load(saved))
    assert isinstance(cfg, DictConfig)
    for override in OverridesParser.create().parse_overrides(overrides=list(overrides)):
        key = override.key_or_group
        if key == "ckpt_path":
            continue
        if not key.startswith(MAY_CHANGE):
            free = ", ".join(name.rstrip(".") for name in MAY_CHANGE)
            raise ConfigError(f"{override.input_line}: a resumed run keeps it; only {free} may change")
        try:
            OmegaConf.update(cfg, key, override.value())
        except OmegaConfBaseException as error:
            raise ConfigError(f"{override.input_line}: {str(error).splitlines()[0]}") from error
    cfg.ckpt_path = ckpt_path
    return cfg
