"""Reads a configuration of another project: yaml, JSON, a shell script or a Python script.

Invariants: nothing of a script runs outside the jail, which has neither the person's files nor a
network; there recorders stand in for its trainers, and of the files next to it only scripts and
modules are copied; a value that cannot be read is `Unreadable` and not an error of the file.
"""

import asyncio
import os
import re
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any
from warnings import catch_warnings

import msgspec
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from async_rl.core.errors import ConfigError
from async_rl.sandbox.cell import Cell, CellFailed, Outcome, Work, command, interpreter_paths
from async_rl.sandbox.namespaces import SYSTEM
from async_rl.sandbox.protocol import COMMANDS, NAMESPACES, CommandSpec, Ending, Profile

Values = dict[str, Any]
"""By dotted key."""
_PROBLEMS = (OmegaConfBaseException, HydraException, YAMLError, OSError, ValueError)
_OVERRIDE = re.compile(r"(?:--|\+{0,2})([\w./@-]+)=(.*)", re.DOTALL)
_UNKNOWN = "unknown"
CPU_S = 10.0
_LOADER = "/lib64/ld-linux-x86-64.so.2"
_BYTES = 1 << 28
# A message carries at most 253 descriptors.
_MAX_FILES = 60
_SCRIPTS = (".sh", ".bash", ".py")
_LONGEST_FILE_BYTES = 1 << 20


class Unreadable(msgspec.Struct, frozen=True):
    """Takes the place of a value that cannot be read."""

    reason: str


class Script(msgspec.Struct, frozen=True):
    """trainers: keyword arguments of each trainer that a Python script made; notes: unknown values
    that decided a branch, and the error that ended the script.
    """

    trainers: list[dict[str, Any]]
    notes: list[str]


def read_source(file: Path, overrides: Sequence[str] = ()) -> list[Values]:
    """Return what a file gives to each trainer that it starts; a script gets the overrides as its
    arguments.

    Raises ConfigError if the file cannot be read at all.
    """
    try:
        # JSON is YAML too.
        if file.suffix in (".yaml", ".yml", ".json"):
            return [_of_yaml(file)]
        if file.suffix == ".py":
            return _of_python(file, overrides)
        return [_of_command(file, words) for words in of_shell(file, overrides)]
    except _PROBLEMS as error:
        raise ConfigError(f"{file}: not readable as a configuration: {_first(error)}") from error


def arguments(words: Sequence[str]) -> Values:
    """Return the values of `--name value`, `--name=value` and `key=value` in a command line."""
    source: Values = {}
    flag = ""
    for word in words:
        override = _OVERRIDE.fullmatch(word)
        if override:
            flag = ""
            source[override[1]] = value_of(override[2])
        elif word.startswith("--"):
            flag = word.removeprefix("--")
            source[flag] = True  # a flag without a value is a switch
        elif flag:
            value = value_of(word)
            before = source[flag]
            several = [*before, value] if isinstance(before, list) else [before, value]
            source[flag] = value if before is True else several
    return source


def value_of(text: str) -> Any:
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
    if not text.startswith(("[", "{", "'", '"')) and "${" not in text:
        return text
    try:
        return OmegaConf.to_container(OmegaConf.create(f"value: {text}"), resolve=True)["value"]
    except _PROBLEMS as error:
        return Unreadable(f"{text}: {_first(error)}")


def _of_command(file: Path, words: list[str]) -> Values:
    """The values of a recorded command, on top of those of the file that it names."""
    # Before the program stand launchers with flags of their own.
    starts = [i for i, word in enumerate(words) if word == "-m" or word.endswith(".py")] or [0]
    start = starts[-1] + (words[starts[-1]] == "-m")
    source = arguments(words[start + 1 :])
    below: Values = {"program": words[start]}
    launcher = arguments(words[:start])
    processes = launcher.get("num_processes") or launcher.get("nproc_per_node")
    if processes:
        below["num_processes"] = processes
    folder = str(source.pop("config-path", ""))
    for flag in ("config", "config-name"):
        if flag in source:
            below |= _of_other_file(file, Path(folder, str(source.pop(flag))))
    return below | source


def _of_other_file(file: Path, name: Path) -> Values:
    """The values of a file that a command names, found from here or from above the script."""
    path = name if name.suffix else name.with_name(f"{name.name}.yaml")
    for folder in (Path.cwd(), *file.resolve().parents):
        if (folder / path).is_file():
            return _of_yaml(folder / path)
    return {"config-name": str(name)}


def _of_python(file: Path, overrides: Sequence[str]) -> list[Values]:
    script = of_python(file, [f"--{word}" for word in overrides])
    if not script.trainers:
        raise ConfigError(f"{file}: the script makes no trainer: {'; '.join(script.notes)}")
    notes = {note: Unreadable("so its values may be others") for note in script.notes}
    found = []
    for trainer in script.trainers:
        given = trainer.get("args")
        # Its arguments are keys of their own, unless only the real packages know them.
        if isinstance(given, dict) and _UNKNOWN not in given:
            trainer |= trainer.pop("args")
        found.append(notes | _of_tree(trainer))
    return found


def _of_yaml(file: Path) -> Values:
    tree = OmegaConf.load(file)
    if not isinstance(tree, DictConfig):
        raise ValueError("it contains no mapping")
    parts = tree.pop("defaults", [])
    if not parts:
        return _of_tree(tree)
    try:
        # hydra warns of a search path that only the system's own package has.
        with (
            catch_warnings(action="ignore"),
            initialize_config_dir(str(file.resolve().parent), version_base=None),
        ):
            return _of_tree(compose(file.stem))
    except (HydraException, OmegaConfBaseException):
        # Files of the system itself are not here; the table has their values.
        return {f"defaults.{part}": "" for part in parts} | _of_tree(tree)


def _of_tree(tree: Any) -> Values:
    source: Values = {}
    _collect(OmegaConf.create(tree), "", source)
    return source


def _collect(node: DictConfig, prefix: str, source: Values) -> None:
    """In place: add the leaves of a node. An empty mapping is a leaf, so that it is mentioned."""
    for name in node:
        key = f"{prefix}{name}"
        try:
            value = "???" if OmegaConf.is_missing(node, name) else node[name]
            if isinstance(value, DictConfig) and value and _UNKNOWN not in value:
                _collect(value, f"{key}.", source)
                continue
            is_node = OmegaConf.is_config(value)
            source[key] = OmegaConf.to_container(value, resolve=True) if is_node else value
        except OmegaConfBaseException as error:
            source[key] = Unreadable(_first(error))
        if isinstance(source[key], dict) and _UNKNOWN in source[key]:
            source[key] = Unreadable(f"only the script knows it: {source[key][_UNKNOWN]}")


def _first(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def of_shell(file: Path, words: Sequence[str]) -> list[list[str]]:
    """Return the words of every command by which a shell script starts a trainer's program."""
    _, errors, recorded = _run(file, "recorder.sh", ["/usr/bin/bash", file.name, *words])
    commands = recorded.decode(errors="replace").split("\0\1\0")[:-1]
    if not commands:
        raise ConfigError(f"{file}: bash starts no trainer from it ({_said(errors)})")
    return [command.split("\0") for command in commands]


def of_python(file: Path, words: Sequence[str]) -> Script:
    """Return what a Python script gives to its trainers."""
    arguments = [sys.executable, "-s", "-S", "-B", "recorder.py", file.name, *words]
    output, errors, _ = _run(file, "recorder.py", arguments)
    try:
        return msgspec.json.decode(output, type=Script)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file}: it ends before it makes a trainer ({_said(errors)})") from error


def _said(errors: bytes) -> str:
    return errors.decode(errors="replace").strip()[-200:] or "without a message"


def _run(file: Path, recorder: str, arguments: list[str]) -> list[bytes]:
    """Run a command next to the script, its neighbours and the recorder."""
    near = [
        path
        for path in sorted(file.parent.iterdir())
        if path.suffix in _SCRIPTS and path.is_file() and path != file
    ]
    texts = {
        path.name: path.read_bytes()
        for path in [*near[:_MAX_FILES], file]
        if path.stat().st_size <= _LONGEST_FILE_BYTES
    }
    if file.name not in texts:
        raise ConfigError(f"{file}: no script has more than {_LONGEST_FILE_BYTES >> 20} MB")
    texts[recorder] = resources.files(__package__).joinpath(recorder).read_bytes()
    executable = os.path.realpath(arguments[0])
    spec = CommandSpec(
        profile=Profile.TOOLS,
        executable=executable,
        arguments=[executable, *arguments[1:]],
        environment=[
            f"HOME={os.path.expanduser('~')}",
            f"BASH_ENV={recorder}",
            f"ASYNC_RL_DIRECTORY={os.getcwd()}",
        ],
        files=list(texts),
        product="recorded",
        readable=[*interpreter_paths(), *SYSTEM],
        runnable=[executable, os.path.realpath(_LOADER), *SYSTEM],
        cpu_s=CPU_S,
        memory_bytes=_BYTES,
        process_limits=[],
        file_bytes=_BYTES,
        scratch_bytes=sum(map(len, texts.values())) + (1 << 24),
    )
    try:
        ran = asyncio.run(_in_cell(command(spec, b"", list(texts.values()), _BYTES)))
    except (CellFailed, OSError) as error:
        raise ConfigError(
            f"{file}: the jail that runs scripts does not work: {error}; allow user namespaces"
            " (async-rl doctor), or migrate the yaml or JSON file that the script reads"
        ) from error
    if ran.reply.ending in (Ending.CPU, Ending.WALL):
        raise ConfigError(
            f"{file}: it was ended after {ran.reply.wall_s:.0f} s, without an end of its own"
        )
    return ran.contents


async def _in_cell(work: Work) -> Outcome:
    cell = await Cell.start(NAMESPACES, (), kind=COMMANDS)
    try:
        return await cell.run(work)
    finally:
        cell.kill()
