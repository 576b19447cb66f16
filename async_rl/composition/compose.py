"""Composition of a RunConfig from files and overrides, validated by the schema.

Invariants: every problem is a ConfigError of one or more lines, each naming path, value and remedy;
paths in the result are absolute.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from async_rl.composition import schema
from async_rl.composition.choices import (
    CONF_DIR,
    KIND,
    Tree,
    expand,
    is_choice,
    put,
    variants,
)
from async_rl.composition.files import (
    USER_CONFIG,
    base,
    compose_files,
    names,
    read_user_file,
)
from async_rl.composition.fitting import fit_to_machine
from async_rl.composition.old_names import (
    modernized,
    require_same_objective,
    translated,
    with_new_names,
)
from async_rl.composition.overrides import Overrides, read_overrides
from async_rl.composition.problems import nearest, problems_of
from async_rl.composition.yaml_problems import not_composed, place
from async_rl.config.base import as_builtins, replace
from async_rl.config.checks.run import check
from async_rl.config.plugins import DATA_SOURCE, is_function, is_plugin
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.core.machine import Machine, this_machine


def compose(conf: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Compose `conf` (a name from conf/, or a path of a yaml file) with `key=value` overrides,
    validate and check it.

    Raises ConfigError for wrong keys, types, ranges and combinations, before anything starts.
    """
    return compose_for(this_machine(), conf, overrides)[0]


def compose_for(
    machine: Machine, conf: str, overrides: Sequence[str] = ()
) -> tuple[RunConfig, str]:
    """As `compose`, for this machine; also the preset of conf/hardware that was given or that fits
    it.
    """
    config, preset = _composed(conf, overrides, machine)
    check(config)
    return config, preset


def compose_unchecked(conf: str, overrides: Sequence[str] = ()) -> RunConfig:
    """As `compose`, without the checks that join several settings."""
    return _composed(conf, overrides, this_machine())[0]


def recompose(path: Path, overrides: Sequence[str]) -> RunConfig:
    """A resolved configuration that `write_config` wrote, with `key=value` overrides, validated and
    checked as `compose` does.
    """
    try:
        written = msgspec.yaml.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, OSError) as error:
        raise ConfigError(f"{path}: {error}") from error
    given = read_overrides(overrides, [])
    require_same_objective(written)
    config = _finished(modernized(written), given, f"{path}", {})
    check(config)
    return config


def as_written(conf: str) -> Tree:
    """Return the composition of `conf` for a machine without GPUs, with `${...}` left as written;
    for docs/.
    """
    tree, _ = compose_files(conf, ["hardware=cpu"], "local", this_machine())
    expand(tree)
    return tree


def write_config(config: RunConfig, path: Path) -> None:
    """Write the resolved configuration; it must not exist yet, since it is written once."""
    with path.open("x") as file:
        file.write(to_yaml(config))


def to_yaml(config: RunConfig) -> str:
    """The resolved configuration as every process will read it."""
    return msgspec.yaml.encode(as_builtins(config)).decode()


def _composed(conf: str, overrides: Sequence[str], machine: Machine) -> tuple[RunConfig, str]:
    path = Path(conf).expanduser()
    own = read_user_file(conf, path) if path.suffix in (".yaml", ".yml") else {}
    if not own and conf not in names():
        best = nearest(conf, among=names())
        hint = f"; did you mean {best}?" if best else ""
        raise ConfigError(
            f"conf={conf}: neither a name from conf/ ({', '.join(names())}) nor a yaml file{hint}"
        )
    directories = [path.resolve().parent] if own else []
    given = read_overrides(overrides, [*directories, CONF_DIR])
    launcher = _launcher_of(own, given)
    groups = [*given.groups, *(f"hydra.searchpath=['file://{folder}']" for folder in directories)]
    try:
        tree, preset = compose_files(USER_CONFIG if own else conf, groups, launcher, machine)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        message = not_composed(conf, path if own else None, error, names())
        raise ConfigError("\n".join([*given.problems, message])) from error
    if preset == "cluster" and launcher == "local":
        raise ConfigError(
            "hardware=cluster with launcher=local: the preset divides the nodes of a cluster; set"
            " launcher=ray or launcher=slurm, or leave hardware out"
        )
    # Old names belong to the variant that the run has, not to the one that a file chose.
    for setting, value in given.values:
        if is_choice(setting, value):
            put(tree, setting, value)
    config = _finished(with_new_names(tree), given, conf, own)
    return fit_to_machine(config, machine, preset, _chosen(given, own)), preset


def _chosen(given: Overrides, own: Tree) -> Collection[str]:
    """Return the paths of the settings that the user chose."""
    tree = copy.deepcopy(own)
    for path, value in given.values:
        put(tree, path, value)
    return dict(schema.flatten(translated(tree)[0])).keys()


def _launcher_of(own: Tree, given: Overrides) -> str:
    """Return the name of the launcher, on which the preset of conf/hardware depends."""
    tree = {"launcher": own.get("launcher", base()["launcher"])}
    for path, value in given.values:
        if path.partition(".")[0] == "launcher":
            put(tree, path, value)
    chosen = tree["launcher"]
    name = chosen.get(KIND) if isinstance(chosen, dict) else chosen
    # The schema reports an unknown name; until then no preset may ask for its nodes.
    return name if name in variants()["launcher"] else "local"


def _finished(tree: Tree, given: Overrides, conf: str, own: Tree) -> RunConfig:
    """The configuration from the files' tree and the overrides. own: the user's file, if any."""
    for path, value in given.values:
        put(tree, path, value)
    tree = with_new_names(tree)
    expand(tree)
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except OmegaConfBaseException as error:
        message = not_composed(conf, Path(conf).expanduser() if own else None, error, names())
        raise ConfigError("\n".join([*given.problems, message])) from error
    assert isinstance(resolved, dict)
    tree = {str(key): value for key, value in resolved.items()}
    for path, setting in schema.settings().items():
        _amend(tree, path, is_list_of_strings=setting.is_list_of_strings)
    by_epochs = tree.get("num_steps", 0) is None
    problems_by_path = problems_of({**tree, "num_steps": 1} if by_epochs else tree)
    of_file = dict(schema.flatten(translated(own)[0])).keys() - dict(given.values).keys()
    located = [
        f"{place(conf, Path(conf).expanduser(), path)}: {text}" if path in of_file else text
        for path, text in problems_by_path.items()
    ]
    if problems := [*given.problems, *located]:
        raise ConfigError("\n".join(problems))
    if not by_epochs:
        return RunConfig.model_validate(tree)
    from async_rl.data.epochs import steps_of_epochs

    config = RunConfig.model_validate({**tree, "num_steps": 1})
    return replace(config, num_steps=steps_of_epochs(config))


PATH_SETTINGS = (
    "output_dir",
    "cache_dir",
    "data.train_files",
    "data.val_files",
    "data.metadata_file",
    "data.tokenizer",
    "checkpoint.mirror",
    "model.lora.host",
)


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
        node[leaf] = (
            [_path_or_source(v) for v in node[leaf]]
            if isinstance(node[leaf], list)
            else _absolute(node[leaf])
        )
    elif path == "model.path" and isinstance(node[leaf], str) and is_local_model(node[leaf]):
        node[leaf] = _absolute(node[leaf])


def _path_or_source(value: Any) -> Any:
    """A file of prompts as an absolute path; a data source keeps its name."""
    if isinstance(value, str) and not Path(value).suffix and is_plugin(value, DATA_SOURCE):
        return value
    return value if isinstance(value, str) and is_function(value) else _absolute(value)


def is_local_model(model: str) -> bool:
    """Return whether a model is named by a directory rather than by its hub name."""
    return model.startswith(("/", ".", "~")) or Path(model).exists()


def _absolute(value: Any) -> Any:
    return (
        os.path.abspath(os.path.expanduser(value))
        if isinstance(value, str) and value and "://" not in value
        else value
    )
