"""The command line around Hydra: a user's mistake becomes one line and exit code 2, a bug keeps its traceback."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from .config import PROJECT, ConfigError, closest, known_keys

MISTAKE = 2


def launch(main: Callable[[], Any], schema: type) -> None:
    """Run a hydra.main function whose keys ``schema`` types; what Hydra refuses is said in one line."""
    asked_for_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing its own three lines
    _show_own_log()
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        if asked_for_traceback:
            raise
        refuse(explain(error, known_keys(schema)))


def _show_own_log() -> None:
    """What the library has to say, as plain lines."""
    own = logging.getLogger("attnlimits")
    own.setLevel(logging.INFO)
    if not own.handlers:
        own.addHandler(logging.StreamHandler(sys.stdout))


def job(task: Callable[[DictConfig, Path], Any], cfg: DictConfig) -> Any:
    """Run the task in Hydra's output directory; a ConfigError is one line, and leaves no empty directory behind."""
    directory = Path(HydraConfig.get().runtime.output_dir)
    try:
        return task(cfg, directory)
    except ConfigError as error:
        _remove_if_empty(directory)
        refuse(str(error))


def overrides() -> list[str]:
    """What the user typed, without Hydra's own keys."""
    return list(HydraConfig.get().overrides.task)


def refuse(line: str) -> NoReturn:
    """Say the user's mistake and exit."""
    print(f"error: {line}", file=sys.stderr)
    raise SystemExit(MISTAKE)


def _remove_if_empty(directory: Path) -> None:
    for folder in (directory, directory.parent, directory.parent.parent):
        try:
            folder.rmdir()
        except OSError:
            return


def explain(error: Exception, keys: Sequence[str]) -> str:
    """One line for an exception of Hydra or OmegaConf: key, value, what is allowed; ``keys`` are those that exist."""
    chain = list(_causes(error))
    text = "\n".join(str(link) for link in chain)
    for line in (_unknown_option(text), _unknown_group(text, keys), _wrong_type(text), _unknown_key(text, keys)):
        if line:
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
    return f"{group}={option}: unknown option{closest(option, available)}; there are {', '.join(available)}"


def _unknown_group(text: str, keys: Sequence[str]) -> str | None:
    match = re.search(r"Could not override '([^']+)'\.\s+No match in the defaults list", text)
    return match and f"{match[1]}: unknown key{closest(match[1], keys)}"


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


def _unknown_key(text: str, keys: Sequence[str]) -> str | None:
    match = re.search(r"full_key: (\S+)", text) or re.search(r"Could not override '([^']+)'", text)
    if not match or not re.search(r"not in struct|not in '", text):
        return None
    return f"{match[1]}: unknown key{closest(match[1], keys)}"
