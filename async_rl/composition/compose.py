"""Composition of a RunConfig from files and overrides, validated by the schema.

Invariants: every problem is a ConfigError of one or more lines, each naming path, value and remedy;
paths in the result are absolute.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from async_rl.composition import schema
from async_rl.composition.choices import KIND, Tree, expand, put, variants
from async_rl.composition.files import Source, base, compose_files, resolved, source_of
from async_rl.composition.fitting import fit_to_machine
from async_rl.composition.overrides import Overrides, read_overrides
from async_rl.composition.problems import problems_of
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
    with _all_problems(given):
        config = _finished(written, given, Source(conf=str(path), path=None, content={}))
    check(config)
    return config


def as_written(conf: str) -> Tree:
    """Return the composition of `conf` for a machine without GPUs, with `${...}` left as written;
    for docs/.
    """
    tree, _ = compose_files(source_of(conf), ["hardware=cpu"], "local", this_machine())
    expand(tree)
    return tree


def write_config(config: RunConfig, path: Path) -> None:
    """Write the resolved configuration; it must not exist yet, since it is written once."""
    with path.open("x") as file:
        file.write(to_yaml(config))


def to_yaml(config: RunConfig) -> str:
    """The resolved configuration as every process will read it. Raises ConfigError if settings
    contradict each other.
    """
    # Every road to a file that processes read passes here. The processes themselves validate types
    # and ranges only.
    check(config)
    return msgspec.yaml.encode(as_builtins(config)).decode()


def _composed(conf: str, overrides: Sequence[str], machine: Machine) -> tuple[RunConfig, str]:
    source = source_of(conf)
    given = read_overrides(overrides, source.directories)
    with _all_problems(given):
        tree, preset = compose_files(source, given.groups, _launcher_of(source, given), machine)
        config = _finished(tree, given, source)
    # What the person wrote stays as written; only settings that nobody chose are fitted to the
    # machine.
    chosen = dict(schema.flatten(_with_values(source.content, given))).keys()
    return fit_to_machine(config, machine, preset, chosen), preset


@contextlib.contextmanager
def _all_problems(given: Overrides) -> Iterator[None]:
    """Raise ConfigError for wrong overrides, together with the problems that the block finds."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError("\n".join([*given.problems, str(error)])) from error
    if given.problems:
        raise ConfigError("\n".join(given.problems))


def _with_values(tree: Tree, given: Overrides) -> Tree:
    """Return the tree with the values of the overrides, whose variants reset their parameters."""
    # The tree of a name from conf/ is cached for the life of the process.
    tree = copy.deepcopy(tree)
    for path, value in given.values:
        put(tree, path, value)
    return tree


def _launcher_of(source: Source, given: Overrides) -> str:
    """Return the name of the launcher, on which the preset of conf/hardware depends."""
    tree = {"launcher": base()["launcher"], **source.content}
    chosen = _with_values(tree, given)["launcher"]
    name = chosen.get(KIND) if isinstance(chosen, dict) else chosen
    # The schema reports an unknown name; until then no preset may use its nodes.
    return name if name in variants()["launcher"] else "local"


def _finished(tree: Tree, given: Overrides, source: Source) -> RunConfig:
    """Return the configuration of the files' tree and the overrides. Raises ConfigError."""
    tree = _with_values(tree, given)
    expand(tree)
    # After `expand`: parameters of a variant may refer to other settings, as in ${num_steps}.
    tree = resolved(tree, source)
    for path, setting in schema.settings().items():
        _amend(tree, path, is_list_of_strings=setting.is_list_of_strings)
    # A run by epochs has as many steps as its prompts need, which are counted below.
    by_epochs = tree.get("num_steps", 0) is None
    if by_epochs:
        tree["num_steps"] = 1
    problems = problems_of(tree)
    if problems:
        # An override wins over the file, so a wrong value of both is the fault of the override.
        in_file = dict(schema.flatten(source.content)).keys() - dict(given.values).keys()
        lines = (
            f"{source.place(path)}: {text}" if path in in_file else text
            for path, text in problems.items()
        )
        raise ConfigError("\n".join(lines))
    config = RunConfig.model_validate(tree)
    if not by_epochs:
        return config
    # Counting reads the data files, with pyarrow for some of them.
    from async_rl.data.prompts import steps_of_epochs

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
    # Absolute, because the processes of the run start in other directories.
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
    if isinstance(value, str) and (
        is_function(value) or (not Path(value).suffix and is_plugin(value, DATA_SOURCE))
    ):
        return value
    return _absolute(value)


def is_local_model(model: str) -> bool:
    """Return whether a model is named by a directory rather than by its hub name."""
    return model.startswith(("/", ".", "~")) or Path(model).exists()


def _absolute(value: Any) -> Any:
    return (
        os.path.abspath(os.path.expanduser(value))
        if isinstance(value, str) and value and "://" not in value
        else value
    )
