"""Composition of a RunConfig from files and overrides: hydra composes, the schema validates.

Invariants: hydra's job features (working directory, logging, output folders) are never used; every
problem is a ConfigError of one or more lines, each naming path, value and remedy; paths in the
result are absolute.
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
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import async_rl.conf
from async_rl.config.base import as_builtins, replace
from async_rl.config.checks.run import check
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.core.machine import Machine, this_machine
from async_rl.launchers.configuration import hardware, schema
from async_rl.launchers.configuration.old_names import modernized, renamed, with_new_names
from async_rl.launchers.configuration.overrides import as_tree, readable

CONF_DIR = Path(async_rl.conf.__file__).resolve().parent
USER_CONFIG = "user_file"
"""Name under which a user's own file is registered with hydra; conf/ has no such file."""


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
    tree, preset = _tree(conf, overrides, machine)
    config = _validated(tree)
    check(config)
    return config, preset


def recompose(path: Path, overrides: Sequence[str]) -> RunConfig:
    """A resolved configuration that `write_config` wrote, with `key=value` overrides, validated and
    checked as `compose` does.
    """
    checked, wrong = readable([renamed(override) for override in overrides], [CONF_DIR])
    try:
        written = OmegaConf.to_container(OmegaConf.load(path))
        assert isinstance(written, dict)
        before = modernized({str(key): value for key, value in written.items()})
        tree = OmegaConf.to_container(OmegaConf.merge(before, as_tree(checked)))
    except (OmegaConfBaseException, YAMLError, OSError) as error:
        raise ConfigError(f"{path}: {error}") from error
    assert isinstance(tree, dict)
    present = {str(key): value for key, value in tree.items()}
    _refuse(wrong, present)
    config = _validated(present)
    check(config)
    return config


def compose_unchecked(conf: str, overrides: Sequence[str] = ()) -> RunConfig:
    """As `compose`, without the checks that join several settings."""
    return _validated(_tree(conf, overrides, this_machine())[0])


def _validated(tree: dict[str, Any]) -> RunConfig:
    for path, setting in schema.settings().items():
        _amend(tree, path, is_list_of_strings=setting.is_list_of_strings)
    by_epochs = tree.get("num_steps", 0) is None
    if problems := schema.problems({**tree, "num_steps": 1} if by_epochs else tree):
        raise ConfigError("\n".join(problems))
    if not by_epochs:
        return RunConfig.model_validate(tree)
    from async_rl.data.epochs import steps_of_epochs

    config = RunConfig.model_validate({**tree, "num_steps": 1})
    return replace(config, num_steps=steps_of_epochs(config))


def names() -> list[str]:
    """The names that `conf=` knows."""
    return sorted(path.stem for path in CONF_DIR.glob("*.yaml") if path.stem != "base")


def as_written(conf: str) -> dict[str, Any]:
    """Return the composition of `conf` for a machine without GPUs, with `${...}` left as written;
    for docs/.
    """
    return _tree(conf, ["hardware=cpu"], this_machine(), resolve=False)[0]


def write_config(config: RunConfig, path: Path) -> None:
    """Write the resolved configuration; it must not exist yet, since it is written once."""
    with path.open("x") as file:
        file.write(to_yaml(config))


def to_yaml(config: RunConfig) -> str:
    """The resolved configuration as every process will read it."""
    return msgspec.yaml.encode(as_builtins(config)).decode()


def _tree(
    conf: str, overrides: Sequence[str], machine: Machine, *, resolve: bool = True
) -> tuple[dict[str, Any], str]:
    OmegaConf.register_new_resolver("with_files", with_files, replace=True)
    directory = _register_user_file(conf)
    if directory is None and conf not in names():
        best = schema.nearest(conf, among=names())
        hint = f"; did you mean {best}?" if best else ""
        raise ConfigError(
            f"conf={conf}: neither a name from conf/ ({', '.join(names())}) nor a yaml file{hint}"
        )
    for name, function in hardware.resolvers(machine, _launcher(directory, overrides)).items():
        OmegaConf.register_new_resolver(name, function, replace=True)
    overrides = [renamed(override) for override in overrides]
    directories = [CONF_DIR] if directory is None else [directory, CONF_DIR]
    checked, wrong = readable(overrides, directories)
    if directory is not None:
        checked.append(f"hydra.searchpath=['file://{directory}']")
    try:
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            # Entries of a mapping are new names to hydra.
            given = [
                f"++{word}" if word.startswith(tuple(schema.mappings())) else word
                for word in checked
            ]
            composed = hydra_compose(
                conf if directory is None else USER_CONFIG,
                overrides=given,
                return_hydra_config=True,
            )
            preset = str(composed.hydra.runtime.choices.get("hardware", "none"))
            with open_dict(composed):
                del composed["hydra"]
            tree = OmegaConf.to_container(composed, resolve=resolve, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"conf={conf}: {str(error).replace(USER_CONFIG, conf)}") from error
    assert isinstance(tree, dict)
    result = {str(key): value for key, value in tree.items()}
    _refuse(wrong, result)
    return result, preset


def _refuse(wrong: Sequence[str], tree: dict[str, Any]) -> None:
    """Raise ConfigError for wrong overrides, together with what is wrong with all the others.

    A person who mistypes a key and a value sees both after one attempt.
    """
    if not wrong:
        return
    problems = list(wrong)
    try:
        _validated(tree)
    except ConfigError as error:
        problems.append(str(error))
    raise ConfigError("\n".join(problems))


def _launcher(directory: Path | None, overrides: Sequence[str]) -> str:
    """The launcher that the overrides, else the user's file, ask for; what conf/ says without
    either.
    """
    given = [
        override.removeprefix("launcher=")
        for override in overrides
        if override.startswith("launcher=")
    ]
    file = OmegaConf.load(CONF_DIR / "base.yaml")
    if directory is not None:
        file = OmegaConf.merge(file, ConfigStore.instance().load(f"{USER_CONFIG}.yaml").node)
    return given[-1] if given else str(file["launcher"])


def _register_user_file(conf: str) -> Path | None:
    """Make a user's yaml file known to hydra; returns its directory, or None if `conf` is a name.

    It goes through hydra's store because hydra takes a primary file from one directory only, and
    ours is conf/.
    """
    path = Path(conf).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        return None
    if not path.is_file():
        raise ConfigError(
            f"conf={conf}: there is no such file; give the path of a yaml file or one of"
            f" {', '.join(names())}"
        )
    try:
        node = OmegaConf.load(path)
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"conf={conf}: not readable as yaml: {error}") from error
    defaults = node.get("defaults") if isinstance(node, DictConfig) else None
    if not isinstance(defaults, ListConfig):
        raise ConfigError(
            f"conf={conf}: must begin with the configuration it builds on, as in 'defaults:"
            " [ppo_code, _self_]'"
        )
    if "_self_" not in defaults:
        defaults.append("_self_")  # the file's own settings win over those it builds on
    content = OmegaConf.to_container(node, resolve=False)
    assert isinstance(content, dict)
    present = with_new_names({str(key): value for key, value in content.items()})
    ConfigStore.instance().store(name=USER_CONFIG, node=OmegaConf.create(present))
    return path.resolve().parent


PATH_SETTINGS = (
    "output_dir",
    "cache_dir",
    "data.train_files",
    "data.val_files",
    "data.metadata_file",
    "data.tokenizer",
    "checkpoint.mirror",
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
            [_absolute(v) for v in node[leaf]]
            if isinstance(node[leaf], list)
            else _absolute(node[leaf])
        )
    elif path == "model.path" and isinstance(node[leaf], str) and is_local_model(node[leaf]):
        node[leaf] = _absolute(node[leaf])


def is_local_model(model: str) -> bool:
    """Return whether a model is named by a directory rather than by its hub name."""
    return model.startswith(("/", ".", "~")) or Path(model).exists()


def _absolute(value: Any) -> Any:
    return (
        os.path.abspath(os.path.expanduser(value))
        if isinstance(value, str) and value and "://" not in value
        else value
    )


def with_files(with_them: Any, without: Any, *, _root_: DictConfig) -> Any:
    """The first value where the run trains or is evaluated on files of the user's, the second on
    the embedded task.
    """
    return with_them if _root_.data.train_files or _root_.data.val_files else without
