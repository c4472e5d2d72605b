"""The typed schema of every key of conf/train.yaml and conf/analyze.yaml, and every check that needs no weight or text.

Values and their comments live in the YAML files; here are the types, so that a key that is missing or misspelt is an
error. Nothing in this module imports torch: ``python train.py --help`` must answer at once.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf

PROJECT = Path(__file__).resolve().parents[2]


class ConfigError(ValueError):
    """The user's mistake: one line that names key, value and what is allowed."""


@dataclass
class ScratchConfig:
    """A model to be trained from nothing. Chosen by name only: nothing falls back to random weights."""

    n_layer: int = MISSING
    n_head: int = MISSING
    n_embd: int = MISSING
    n_positions: int = MISSING
    vocab_size: int = MISSING


@dataclass
class ModelConfig:
    path: str | None = MISSING
    scratch: ScratchConfig | None = None
    dropout: float | None = None
    gradient_checkpointing: bool = False


@dataclass
class DataConfig:
    kind: str = MISSING
    path: Any = MISSING
    extra_path: Any = None
    url: str | None = None
    encoding: Any = "utf-8"
    strip_gutenberg: bool = False
    validation_fraction: float = MISSING
    batch_size: int = MISSING
    validation_batch_size: int = MISSING
    cache_dir: str = MISSING


@dataclass
class OptimizerConfig:
    lr: float = MISSING
    betas: list[float] = MISSING
    weight_decay: float = MISSING
    warmup_steps: int = MISSING
    final_lr_fraction: float = MISSING
    schedule_steps: int | None = MISSING


@dataclass
class TrainerConfig:
    max_steps: int | None = MISSING
    max_epochs: int | None = MISSING
    accumulate: int = MISSING
    clip: float | None = MISSING
    precision: str = MISSING
    validate_every: int = MISSING
    validation_blocks: int | None = MISSING
    log_every: int = MISSING
    accelerator: str = MISSING
    devices: Any = MISSING
    strategy: str = MISSING
    deterministic: bool = MISSING


@dataclass
class LoggerConfig:
    kind: str = MISSING
    offline: bool = True
    project: str = "attnlimits"
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)


@dataclass
class SweepConfig:
    resume: bool = MISSING


@dataclass
class TrainConfig:
    T: float = MISSING
    context_length: int = MISSING
    seed: int | None = MISSING
    ckpt_path: str | None = MISSING
    compile: Any = "auto"  # not str: YAML reads on and off as booleans
    name: str = MISSING
    normalizer: dict[str, Any] = MISSING
    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    optimizer: OptimizerConfig = MISSING
    trainer: TrainerConfig = MISSING
    logger: LoggerConfig = MISSING
    callbacks: dict[str, Any] = MISSING
    sweep: SweepConfig = MISSING


@dataclass
class ThresholdsConfig:
    sharp: float = MISSING
    vanishing_slope: float = MISSING
    vanishing_entropy: float = MISSING
    saturated: float = MISSING


@dataclass
class AnalysisConfig:
    experiments: list[str] = MISSING
    passages: int = MISSING
    lengths: list[int] = MISSING
    length_n: int = MISSING
    top_n: list[int] = MISSING
    critical_n: list[int] = MISSING
    ks_level: float = MISSING
    separability_n: list[int] = MISSING
    temperatures: list[float] = MISSING
    steps: list[float] = MISSING
    representation: str = MISSING
    logits: str = MISSING
    verdict_n: int = MISSING
    thresholds: ThresholdsConfig = MISSING


@dataclass
class AnalyzeConfig:
    T: float = MISSING
    context_length: int = MISSING
    seed: int | None = MISSING
    ckpt_path: str | None = MISSING
    compile: Any = "auto"
    name: str = MISSING
    normalizer: dict[str, Any] = MISSING
    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    logger: LoggerConfig = MISSING
    analysis: AnalysisConfig = MISSING


DATA_KINDS = ("python_reference", "text", "war_and_peace")
LOGGER_KINDS = ("csv", "tensorboard", "wandb")
PRECISIONS = ("32", "bf16-mixed", "16-mixed")
COMPILE_MODES = ("auto", "on", "off")


def plain(node: Any) -> Any:
    """A part of a configuration as dicts, lists and scalars, interpolations resolved."""
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def compile_mode(cfg: DictConfig) -> Any:
    """How the sparse normalizers are solved, as newton.set_compile takes it."""
    return {True: "on", False: "off"}.get(cfg.compile, cfg.compile)


def register() -> None:
    """Put the schema and the resolvers of the YAML files where Hydra finds them. Safe to call twice."""
    ConfigStore.instance().store(name="train_schema", node=TrainConfig)
    ConfigStore.instance().store(name="analyze_schema", node=AnalyzeConfig)
    OmegaConf.register_new_resolver("project", lambda path: str(PROJECT / path), replace=True)
    OmegaConf.register_new_resolver("run_dir", run_directory, replace=True)
    OmegaConf.register_new_resolver("subject", subject, replace=True)


def run_directory(ckpt_path: str | None, fresh: str) -> str:
    """A resumed run goes on in its own directory; any other gets a fresh one."""
    if ckpt_path and Path(ckpt_path).is_file():
        return str(Path(ckpt_path).resolve().parents[1])
    return fresh


def subject(ckpt_path: str | None, model_path: str | None, normalizer: str, T: float) -> str:
    """What is analysed, as a part of a file name: the training run, or a model and its normalizer."""
    if ckpt_path is None:
        return f"{Path(model_path).name if model_path else 'scratch'}-{normalizer}-T{T}"
    path = Path(ckpt_path).resolve()
    inside_a_run = path.is_file() or path.name == "model"
    return path.parents[path.is_file()].name if inside_a_run else path.name


def closest(word: str, candidates: Sequence[str]) -> str:
    """``, did you mean ...?``, or nothing: by the whole word, else by the last part of a dotted key."""
    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.75)
    if not close:
        last = {key.rsplit(".", 1)[-1]: key for key in candidates}
        close = [last[m] for m in difflib.get_close_matches(word.rsplit(".", 1)[-1], list(last), n=1, cutoff=0.6)]
    return f", did you mean {close[0]}?" if close else ""


def known_keys(schema: type = TrainConfig) -> list[str]:
    """Every key of the schema, dotted, and the one group of conf/ that is not a key."""
    return sorted({*_dotted(schema), "experiment"})


def _dotted(schema: Any, prefix: str = "") -> Iterator[str]:
    hints = get_type_hints(schema)
    for item in fields(schema):
        key = f"{prefix}{item.name}"
        yield key
        for kind in (hints[item.name], *get_args(hints[item.name])):
            if is_dataclass(kind):
                yield from _dotted(kind, f"{key}.")


def check(cfg: DictConfig) -> None:
    """All checks of a training configuration that need no weight and no text.

    Raises:
        ConfigError: the first thing that is wrong.
    """
    _check_common(cfg, TrainConfig, (*NUMBERS, *TRAIN_NUMBERS), (*CHOICES, ("trainer.precision", PRECISIONS)))
    steps, epochs = cfg.trainer.max_steps, cfg.trainer.max_epochs
    if (steps is None) == (epochs is None):
        raise ConfigError(f"trainer.max_steps={steps} trainer.max_epochs={epochs}: set exactly one of the two")


def check_analysis(cfg: DictConfig) -> None:
    """All checks of an analysis that need no weight and no text.

    Raises:
        ConfigError: the first thing that is wrong.
    """
    from .analysis.settings import Settings

    _check_common(cfg, AnalyzeConfig, (*NUMBERS, (("analysis.passages",), _positive, "> 0")), CHOICES)
    try:
        Settings.of(plain(cfg.analysis), seed=cfg.seed)
    except ValueError as error:
        raise ConfigError(f"analysis.{error}") from error


def _check_common(cfg: DictConfig, schema: type, numbers: Sequence[Number], choices: Sequence[Choice]) -> None:
    _check_known(cfg, set(known_keys(schema)))
    _check_missing(cfg)
    for keys, good, allowed in numbers:
        for key in keys:
            _require(cfg, key, good(OmegaConf.select(cfg, key)), allowed)
    _check_choices(cfg, choices)
    _check_data(cfg)
    _check_normalizer(cfg)
    if cfg.ckpt_path is None:  # a checkpoint has its model, whose source may be gone
        _check_model(cfg)


def _check_known(cfg: DictConfig, known: set[str], prefix: str = "") -> None:
    """Hydra lets ``+new=1`` past the schema; what is not in it would change nothing."""
    for key in map(str, cfg):
        dotted = f"{prefix}{key}"
        if dotted not in known:
            raise ConfigError(f"{dotted}: unknown key{closest(dotted, sorted(known))}")
        if dotted not in ("normalizer", "callbacks") and OmegaConf.is_dict(cfg._get_node(key)) and cfg[key] is not None:
            _check_known(cfg[key], known, f"{dotted}.")


def _check_missing(cfg: DictConfig) -> None:
    if missing := sorted(OmegaConf.missing_keys(cfg)):
        raise ConfigError(f"{missing[0]}: needs a value")


def _require(cfg: DictConfig, key: str, good: bool, allowed: str) -> None:
    if not good:
        raise ConfigError(f"{key}={OmegaConf.select(cfg, key)}: must be {allowed}")


def _positive(value: Any) -> bool:
    return math.isfinite(value) and value > 0


def _not_negative(value: Any) -> bool:
    return math.isfinite(value) and value >= 0


def _null_or(good: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or good(value)


Number = tuple[tuple[str, ...], Callable[[Any], bool], str]  # keys, what they may be, how an error says it
Choice = tuple[str, Sequence[str]]

NUMBERS: tuple[Number, ...] = (
    (("T", "data.batch_size", "data.validation_batch_size"), _positive, "finite and > 0"),
    (("model.dropout",), _null_or(lambda v: 0 <= v <= 1), "between 0 and 1"),
    (("data.validation_fraction",), lambda v: 0 < v < 1, "above 0 and below 1"),
    (("seed",), _null_or(lambda v: 0 <= v < 2**32), "between 0 and 4294967295, or null (unseeded)"),
)
TRAIN_NUMBERS: tuple[Number, ...] = (
    (("optimizer.lr",), _positive, "finite and > 0"),
    (("trainer.accumulate", "trainer.validate_every", "trainer.log_every"), _positive, "> 0"),
    (("trainer.max_steps", "trainer.max_epochs", "optimizer.schedule_steps"), _null_or(_positive), "> 0, or null"),
    (("trainer.clip", "trainer.validation_blocks"), _null_or(_positive), "finite and > 0, or null"),
    (("optimizer.weight_decay", "optimizer.warmup_steps"), _not_negative, "finite and >= 0"),
    (("optimizer.final_lr_fraction",), lambda v: 0 <= v <= 1, "between 0 and 1"),
    (("optimizer.betas",), lambda v: len(v) == 2 and all(0 <= beta < 1 for beta in v), "two numbers in [0, 1)"),
)
CHOICES: tuple[Choice, ...] = (("data.kind", DATA_KINDS), ("logger.kind", LOGGER_KINDS))


def _check_choices(cfg: DictConfig, choices: Sequence[Choice]) -> None:
    for key, allowed in choices:
        _require(cfg, key, OmegaConf.select(cfg, key) in allowed, "one of " + ", ".join(allowed))
    if compile_mode(cfg) not in COMPILE_MODES:
        raise ConfigError(f"compile={cfg.compile}: must be one of {', '.join(COMPILE_MODES)}")
    if not str(cfg.name).strip() or "/" in cfg.name:
        raise ConfigError(f"name={cfg.name!r}: must be a plain file name")


def _check_data(cfg: DictConfig) -> None:
    for key in ("data.path", "data.extra_path", "data.encoding"):
        value = OmegaConf.select(cfg, key)
        good = value is None or isinstance(value, str) or _is_list_of_str(value)
        _require(cfg, key, good, "a string or a list of strings")
    if cfg.data.kind == "python_reference" and cfg.data.path is not None:
        raise ConfigError(f"data.path={cfg.data.path}: python_reference is a text of its own; use data=text")
    if cfg.data.kind == "text" and not cfg.data.path:
        raise ConfigError(f"data.path={cfg.data.path}: data=text needs a file, a glob, a folder or a list of them")


def _is_list_of_str(value: Any) -> bool:
    return isinstance(value, ListConfig) and all(isinstance(item, str) for item in value)


def _check_normalizer(cfg: DictConfig) -> None:
    from .normalizers import NAMING, make_normalizer, normalizer_class, normalizer_options

    spec = plain(cfg.normalizer)
    if "T" in spec:
        raise ConfigError(f"normalizer.T={spec['T']}: set the top-level T instead; there is one temperature")
    try:
        options = normalizer_options(normalizer_class(spec))
        for key, value in spec.items():
            if key not in NAMING:
                _check_option(spec["name"], key, value, options)
        make_normalizer(spec, T=cfg.T, n_heads=1, context_length=2)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_option(name: str, key: str, value: Any, options: dict[str, Any]) -> None:
    if key not in options:
        raise ConfigError(f"normalizer.{key}={value}: {name} has {_listing(options)}")
    declared = options[key].annotation  # a string under `from __future__ import annotations`
    annotation = declared.__name__ if isinstance(declared, type) else str(declared)
    kinds: dict[str, tuple[type, ...]] = {"float": (int, float), "int": (int,), "bool": (bool,), "str": (str,)}
    allowed = [part.strip() for part in annotation.split("|")]
    for part in allowed:
        if part == "None" and value is None:
            return
        if isinstance(value, kinds.get(part, ())) and (part == "bool" or not isinstance(value, bool)):
            return
    raise ConfigError(f"normalizer.{key}={value}: {name} takes {annotation.replace('None', 'null')}")


def _listing(options: Sequence[str] | dict[str, Any]) -> str:
    return ("only " + ", ".join(sorted(options))) if options else "no options"


def _check_model(cfg: DictConfig) -> None:
    scratch = cfg.model.scratch
    if (cfg.model.path is None) == (scratch is None):
        raise ConfigError(f"model.path={cfg.model.path}: give a directory or a hub name, or model.scratch, not both")
    if scratch is not None:
        for key in ("n_layer", "n_head", "n_embd", "n_positions"):
            _require(cfg, f"model.scratch.{key}", scratch[key] > 0, "> 0")
        _require(cfg, "model.scratch.n_embd", scratch.n_embd % scratch.n_head == 0, f"a multiple of {scratch.n_head}")
        _require(cfg, "model.scratch.vocab_size", scratch.vocab_size > 256, "above 256, the bytes")
    positions = model_positions(cfg.model)
    allowed = f"between 2 and {positions}, the positions of {cfg.model.path or 'the model'}"
    _require(cfg, "context_length", 2 <= cfg.context_length <= positions, allowed)


def model_positions(model: DictConfig) -> int:
    """The longest context of a model, from its configuration alone."""
    if model.scratch is not None:
        return model.scratch.n_positions
    declared = _declared(model.path)
    return declared.get("n_positions") or declared.get("max_position_embeddings") or 2**31


def _declared(path: str) -> dict[str, Any]:
    local = Path(path)
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise ConfigError(f"model.path={path}: the folder holds no config.json")
        try:
            return json.loads((local / "config.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"model.path={path}: its config.json is not JSON ({error})") from error
    if local.is_absolute() or path.startswith("."):
        raise ConfigError(f"model.path={path}: no such folder")
    from transformers import PretrainedConfig

    try:
        return PretrainedConfig.get_config_dict(path)[0]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path={path}: neither a folder here nor to be had from the hub; set model.path to a local directory"
        ) from error
