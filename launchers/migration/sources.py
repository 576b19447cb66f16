"""Reads a configuration of another project: yaml, hydra's yaml, TOML, JSON or a command line.

Invariants: nothing of the source is executed; a file that hydra would compose is composed from the
files next to it, so that no key is missing.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from async_rl.core.errors import ConfigError

Values = dict[str, Any]
"""By dotted key."""
_PROBLEMS = (
    OmegaConfBaseException,
    HydraException,
    YAMLError,
    OSError,
    UnicodeDecodeError,
    ValueError,
)
_OVERRIDE = re.compile(r"\+{0,2}([\w.]+)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"^\s*(?:export\s+)?(\w+)=(\S*)\s*$", re.MULTILINE)


def read_source(file: Path, overrides: Sequence[str] = ()) -> Values:
    """Return the values of a file by dotted key, with `key=value` arguments on top.

    Raises ConfigError if it cannot be read.
    """
    try:
        if file.suffix == ".toml":
            source = flat(tomllib.loads(file.read_text()))
        elif file.suffix == ".json":
            source = flat(json.loads(file.read_text()))
        elif file.suffix in (".yaml", ".yml"):
            return _of_yaml(file, overrides)
        else:
            source = arguments(file.read_text())
    except _PROBLEMS as error:
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{file}: not readable as a configuration: {first}") from error
    return source | arguments(shlex.join(overrides))


def arguments(text: str) -> Values:
    """Return the values of `--name value`, `--name=value` and `key=value` in a command line or in a
    shell script, whose plain assignments of variables are filled in.
    """
    text = text.replace("\\\n", " ")  # a command over several lines
    variables: dict[str, str] = {}
    for name, value in _VARIABLE.findall(text):
        variables[name] = Template(value.strip("\"'")).safe_substitute(variables)
    # An assignment is no argument of the command.
    lines = [line for line in text.splitlines() if not _VARIABLE.match(line)]
    words = shlex.split("\n".join(lines), comments=True)
    source: Values = {}
    flag = ""
    for word in (Template(word).safe_substitute(variables) for word in words):
        override = _OVERRIDE.fullmatch(word.removeprefix("--"))
        if override:
            flag = ""
            source[override.group(1)] = _value(override.group(2))
        elif word.startswith("--"):
            flag = word.removeprefix("--")
            source[flag] = True  # a flag without a value is a switch
        elif flag:
            source[flag] = _with_another(source[flag], _value(word))
    return source


def _with_another(before: Any, value: Any) -> Any:
    """The first value of a flag replaces the switch; further ones make a list."""
    if before is True:
        return value
    return [*before, value] if isinstance(before, list) else [before, value]


def _value(text: str) -> Any:
    """Return the number, boolean, null, list or text that is written."""
    names = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in names:
        return names[text.lower()]
    # int first: a float would write 8 as 8.0.
    for reader in (int, float):
        try:
            return reader(text)
        except ValueError:
            continue
    if text.startswith(("[", "{")):
        return OmegaConf.to_container(OmegaConf.create(f"value: {text}"))["value"]
    return text


def _of_yaml(file: Path, overrides: Sequence[str]) -> Values:
    raw = OmegaConf.load(file)
    # Only files of hydra have this key; other yaml files are complete.
    parts = raw.get("defaults") if OmegaConf.is_dict(raw) else None
    if parts:
        return _composed(file, overrides)
    changes = OmegaConf.from_dotlist([text.lstrip("+") for text in overrides])
    tree = OmegaConf.to_container(OmegaConf.merge(raw, changes), resolve=True)
    if not isinstance(tree, Mapping):
        raise ValueError("it contains no mapping")
    return flat(dict(tree))


def _composed(file: Path, overrides: Sequence[str]) -> Values:
    """Compose a file of hydra from the files of its package."""
    path = file.resolve()
    packages = re.findall(r"(?:pkg|file)://([\w./]+)", path.read_text())
    directories = [str(directory) for name in packages for directory in _directories(path, name)]
    given = list(overrides)
    # verl names the directory of its own files as a package, which is not installed here.
    if packages:
        given.append(
            f"hydra.searchpath=[{','.join(f'file://{directory}' for directory in directories)}]"
        )
    try:
        with initialize_config_dir(str(path.parent), version_base=None):
            tree = OmegaConf.to_container(compose(path.stem, given), resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{file}: hydra composes it from files that are not next to it ({first}); give the file"
            " in its package's directory, or the composed configuration that the trainer prints"
            " (verl: _generated_ppo_trainer.yaml)"
        ) from error
    return flat(tree)


def _directories(path: Path, package: str) -> list[Path]:
    """Find the directory of a package above a file of it, without importing the package."""
    parts = package.replace("/", ".").split(".")
    above = (parent.joinpath(*parts) for parent in path.parents)
    return [directory for directory in above if directory.is_dir()][:1]


def flat(
    tree: Any,
    prefix: str = "",
) -> Values:
    """Return the leaves by dotted key. An empty mapping is a leaf, so that it is mentioned too."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    leaves: Values = {}
    for name, value in tree.items():
        leaves.update(flat(value, f"{prefix}.{name}" if prefix else str(name)))
    return leaves
