"""From files and overrides to one RunConfig: hydra composes, the schema validates, nothing is guessed.

Invariants: hydra's job features (working directory, logging, output folders) are never used; every problem is a ConfigError of one or more
lines, each naming path, value and remedy; paths in the result are absolute.
Called by the command line, by tests and by benchmarks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import async_rl.conf
from async_rl.config import RunConfig
from async_rl.config_check import check
from async_rl.errors import ConfigError
from async_rl.launchers import schema

CONF_DIR = Path(async_rl.conf.__file__).resolve().parent
USER_CONFIG = "user_file"
"""Name under which a user's own file is registered with hydra; conf/ has no such file."""


def compose(conf: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Compose `conf` (a name from conf/, or a path of a yaml file) with `key=value` overrides, validate and check it.

    Raises ConfigError for wrong keys, types, ranges and combinations, before anything starts.
    """
    config = compose_unchecked(conf, overrides)
    check(config)
    return config


def compose_unchecked(conf: str, overrides: Sequence[str] = ()) -> RunConfig:
    """As `compose`, without the checks that join several settings."""
    tree = _tree(conf, overrides)
    for path, setting in schema.settings().items():
        _amend(tree, path, is_list_of_strings=setting.is_list_of_strings)
    if problems := schema.problems(tree):
        raise ConfigError("\n".join(problems))
    return msgspec.convert(tree, RunConfig)


def names() -> list[str]:
    """The names that `conf=` knows."""
    return sorted(path.stem for path in CONF_DIR.glob("*.yaml") if path.stem != "base")


def write_config(config: RunConfig, path: Path) -> None:
    """Write the resolved configuration; it must not exist yet, since it is written once."""
    with path.open("x") as file:
        file.write(to_yaml(config))


def to_yaml(config: RunConfig) -> str:
    """The resolved configuration as every process will read it."""
    return OmegaConf.to_yaml(OmegaConf.create(msgspec.to_builtins(config)))


def _tree(conf: str, overrides: Sequence[str]) -> dict[str, Any]:
    OmegaConf.register_new_resolver("share_of_cores", share_of_cores, replace=True)
    directory = _register_user_file(conf)
    if directory is None and conf not in names():
        best = schema.nearest(conf, among=names())
        hint = f"; did you mean {best}?" if best else ""
        raise ConfigError(f"conf={conf}: neither a name from conf/ ({', '.join(names())}) nor a yaml file{hint}")
    checked = _check_overrides(overrides, [CONF_DIR] if directory is None else [directory, CONF_DIR])
    if directory is not None:
        checked.append(f"hydra.searchpath=['file://{directory}']")
    try:
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            composed = hydra_compose(conf if directory is None else USER_CONFIG, overrides=checked)
            tree = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"conf={conf}: {error}") from error
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def _register_user_file(conf: str) -> Path | None:
    """Make a user's yaml file known to hydra; returns its directory, or None if `conf` is a name."""
    path = Path(conf).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        return None
    if not path.is_file():
        raise ConfigError(f"conf={conf}: there is no such file; give the path of a yaml file or one of {', '.join(names())}")
    try:
        node = OmegaConf.load(path)
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"conf={conf}: not readable as yaml: {error}") from error
    if not isinstance(node, DictConfig):
        raise ConfigError(f"conf={conf}: must hold settings (key: value), not a list")
    defaults = node.get("defaults")
    if defaults is None:
        raise ConfigError(
            f"conf={conf}: has no defaults list; begin it with 'defaults: [ppo_code, _self_]' to build on one of {', '.join(names())}"
        )
    if not isinstance(defaults, ListConfig):
        raise ConfigError(f"conf={conf}: defaults must be a list, as in 'defaults: [ppo_code, _self_]'")
    problems = [
        schema.unknown(key, schema.show(value))
        for key, value in schema.flatten({str(k): v for k, v in OmegaConf.to_container(node, resolve=False).items() if k != "defaults"})  # type: ignore[union-attr]
        if key not in schema.settings() and key not in schema.sections()
    ]
    if problems:
        raise ConfigError("\n".join(f"{conf}: {problem}" for problem in problems))
    ConfigStore.instance().store(name=USER_CONFIG, node=node)
    return path.resolve().parent


def _check_overrides(overrides: Sequence[str], directories: Sequence[Path]) -> list[str]:
    """Refuse what hydra would refuse less helpfully, or accept though the schema has no place for it."""
    groups = _groups(directories)
    problems = []
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException:
            problems.append(_unreadable(text))
            continue
        if problem := _override_problem(override, text, groups):
            problems.append(problem)
    if problems:
        raise ConfigError("\n".join(problems))
    return list(overrides)


def _override_problem(override: Override, text: str, groups: dict[str, list[str]]) -> str | None:
    key, value = override.key_or_group, text.partition("=")[2]
    if override.is_delete() or override.is_add():
        return f"{text}: settings can be neither added nor removed; write {key}=<value> to change one"
    if override.is_sweep_override():
        return f"{text}: is a choice of several values; write a list as {key}=[a,b]"
    if key in groups and not key.startswith("hydra"):
        if value in groups[key] or not isinstance(override.value(), str):
            return None
        inside = "; a model is named by model.path" if key == "model" else ""
        return f"{text}: conf/{key}/ has {', '.join(groups[key])}{inside}"
    if key in schema.settings() or key in schema.sections():
        return None
    return schema.unknown(key, value)


def _unreadable(text: str) -> str:
    key, equals, value = text.partition("=")
    if not equals:
        return f"{text}: is not of the form key=value"
    return f"{text}: cannot be read; put the value in quotes, '{key}=\"{value}\"'"


def _groups(directories: Sequence[Path]) -> dict[str, list[str]]:
    """Groups of files to choose from (task, model, algorithm, hardware) with their choices."""
    files = [path for directory in directories for path in directory.glob("*/*.yaml")]
    return {group: sorted({path.stem for path in files if path.parent.name == group}) for group in {path.parent.name for path in files}}


PATH_SETTINGS = ("output_dir", "cache_dir", "data.train_files", "data.val_files")


def _amend(tree: dict[str, Any], path: str, *, is_list_of_strings: bool) -> None:
    """In place: one string becomes a list of one where a list is wanted; paths become absolute."""
    *parents, leaf = path.split(".")
    node: Any = tree
    for parent in parents:
        node = node.get(parent) if isinstance(node, dict) else None
    if not isinstance(node, dict) or leaf not in node:
        return
    if is_list_of_strings and isinstance(node[leaf], str):
        node[leaf] = [node[leaf]]
    if path in PATH_SETTINGS:
        node[leaf] = [_absolute(v) for v in node[leaf]] if isinstance(node[leaf], list) else _absolute(node[leaf])
    elif path == "model.path" and isinstance(node[leaf], str) and is_local_model(node[leaf]):
        node[leaf] = _absolute(node[leaf])


def is_local_model(model: str) -> bool:
    """Whether a model is named by a directory rather than by its hub name."""
    return model.startswith(("/", ".", "~")) or Path(model).exists()


def _absolute(value: Any) -> Any:
    return os.path.abspath(os.path.expanduser(value)) if isinstance(value, str) and value and "://" not in value else value


def share_of_cores(part: int, parts: int) -> list[int]:
    """The part-th of `parts` equal shares of the cores this process may use; all of them where there are fewer than `parts`."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < parts:
        return cores
    return cores[part * len(cores) // parts : (part + 1) * len(cores) // parts]
