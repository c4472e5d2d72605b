"""The command line around Hydra: a user's mistake becomes one line and exit code 2, a bug keeps its traceback."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from .config import PROJECT, ConfigError, TrainConfig

MISTAKE = 2


def launch(main: Callable[[], Any]) -> None:
    """Run a hydra.main function; what Hydra refuses is said in one line."""
    asked_for_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing its own three lines
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        if asked_for_traceback:
            raise
        _refuse(explain(error))


def job(task: Callable[[DictConfig, Path], Any], cfg: DictConfig) -> Any:
    """Run the task in Hydra's output directory; a ConfigError is one line, and leaves no empty directory behind."""
    directory = Path(HydraConfig.get().runtime.output_dir)
    try:
        return task(cfg, directory)
    except ConfigError as error:
        _remove_if_empty(directory)
        _refuse(str(error))


def overrides() -> list[str]:
    """What the user typed, without Hydra's own keys."""
    return list(HydraConfig.get().overrides.task)


def _refuse(line: str) -> None:
    print(f"error: {line}", file=sys.stderr)
    raise SystemExit(MISTAKE)


def _remove_if_empty(directory: Path) -> None:
    for folder in (directory, directory.parent, directory.parent.parent):
        try:
            folder.rmdir()
        except OSError:
            return


def explain(error: Exception) -> str:
    """One line for an exception of Hydra or OmegaConf: key, value, what is allowed."""
    chain = list(_causes(error))
    text = "\n".join(str(link) for link in chain)
    for describe in (_unknown_option, _unknown_group, _wrong_type, _unknown_key):
        if line := describe(text):
            return line
    return " ".join(str(chain[-1]).split("\n")[0].split())


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _unknown_option(text: str) -> str | None:
    match = re.search(r"Could not find '([\w/]+)/([^'/]+)'", text)
    if not match:
        return None
    group, option = match.groups()
    available = sorted(path.stem for path in (PROJECT / "conf" / group).glob("*.yaml"))
    return f"{group}={option}: unknown option{_closest(option, available)}; there are {', '.join(available)}"


def _unknown_group(text: str) -> str | None:
    match = re.search(r"Could not override '([^']+)'\.\s+No match in the defaults list", text)
    return match and f"{match[1]}: unknown key{_closest(match[1], known_keys())}"


def _wrong_type(text: str) -> str | None:
    match = re.search(r"Error merging override \+*([^=\s]+)=(.*)", text)
    reason = re.search(r"Value '.*'.* could not be converted to \w+|field '\w+' is not Optional|Cannot .*", text)
    if not (match and reason):
        return None
    return f"{match[1]}={match[2]}: {_in_yaml_terms(reason[0])}"


def _in_yaml_terms(reason: str) -> str:
    wanted = re.search(r"converted to (\w+)", reason)
    names = {"Float": "a number", "Integer": "a whole number", "Boolean": "true or false", "String": "a text"}
    if wanted:
        return f"must be {names.get(wanted[1], wanted[1])}"
    if "not Optional" in reason:
        return "must not be null"
    return reason


def _unknown_key(text: str) -> str | None:
    match = re.search(r"full_key: (\S+)", text) or re.search(r"Could not override '([^']+)'", text)
    if not match or not re.search(r"not in struct|not in '", text):
        return None
    return f"{match[1]}: unknown key{_closest(match[1], known_keys())}"


def _closest(word: str, candidates: list[str]) -> str:
    """', did you mean ...?': by the whole word, else by the last part of a dotted key."""
    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.6)
    if not close:
        last = {key.rsplit(".", 1)[-1]: key for key in candidates}
        close = [last[m] for m in difflib.get_close_matches(word.rsplit(".", 1)[-1], list(last), n=1, cutoff=0.6)]
    return f", did you mean {close[0]}?" if close else ""


def known_keys() -> list[str]:
    """Every key of the schema, dotted, and the groups of conf/."""
    groups = [path.name for path in (PROJECT / "conf").iterdir() if path.is_dir()]
    return sorted({*_dotted(TrainConfig), *groups})


def _dotted(schema: Any, prefix: str = "") -> Iterator[str]:
    from typing import get_type_hints

    hints = get_type_hints(schema)
    for item in fields(schema):
        key = f"{prefix}{item.name}"
        yield key
        for kind in (hints[item.name], *get_args(hints[item.name])):
            if is_dataclass(kind):
                yield from _dotted(kind, f"{key}.")
