"""The start of a run by a Python program: its rows, functions and settings, in the forms that a
configuration has.

Invariants
- A file is named by its content and stays next to the runs, so that a resumed run finds it.
- Only source is written: of a function, with the imports, the constants and the functions that it
  uses. A function that needs more than its source is refused.
"""

import ast
import dis
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import msgspec

from async_rl.composition import schema
from async_rl.composition.compose import compose_unchecked
from async_rl.composition.files import QUICKSTART
from async_rl.composition.overrides import as_words
from async_rl.core.errors import ConfigError
from async_rl.core.machine import this_machine
from async_rl.core.os import owner_only, replace_file
from async_rl.launchers.api import starting
from async_rl.launchers.api.run import Overrides, Run
from async_rl.service.address import address_of

Function = Callable[..., Any]
Data = Iterable[Mapping[str, Any]] | Function


@owner_only()
def launch(
    conf: str,
    overrides: Overrides = (),
    *,
    data: Data | None = None,
    reward: Function | None = None,
    **settings: object,
) -> Run:
    """Start a run in the background and return it.

    The run does not end with this process; see `open_run`. Rows, and functions that cannot be
    imported, are written to files in `inputs` next to the run.

    Args:
        conf: A name from conf/, such as "grpo_code", or the path of a yaml file.
        overrides: Settings that differ from it: a dict, `{"num_steps": 20}`, with dotted or nested
            names, or words as on the command line, `["num_steps=20"]`.
        data: Rows to train on, as dicts with the columns of docs/data.md, or a function that
            returns them.
        reward: The function that scores a sample (async_rl.plugins.RewardFunction). It and `data`
            may be defined in a notebook, if they use only imports, constants and other such
            functions.
        **settings: More settings: `num_steps=20`, `learner={"ranks": 2}`, or the last part of a
            name, `lr=1e-5`; of several settings with this last part the one with the fewest
            sections.

    Raises:
        ConfigError: The settings do not fit each other or this machine, or a function needs more
            than its source; the message has one line per problem. Nothing was started, and no
            directory of a run was made.
    """
    words = words_of(as_words(overrides), data, reward, settings)
    config, _ = starting.checked_config(conf, words, this_machine())
    run_dir = starting.make_run_dir(config)
    if config.agent.is_service:
        # Now, so that `Run.session` and the service know the same address.
        address_of(run_dir)
    starting.start(config, run_dir)
    return Run(run_dir)


def words_of(
    words: list[str],
    data: Data | None,
    reward: Function | None,
    settings: Mapping[str, object],
) -> list[str]:
    """Return words of the command line with those of the data, the reward and the settings by
    keyword. Raises ConfigError for what has no such form.
    """
    values = {_path_of(name): value for name, value in settings.items()}
    words = [*words, *as_words(values)]
    if data is None and reward is None:
        return words
    place = [word for word in words if word.startswith("output_dir=")]
    folder = Path(compose_unchecked(QUICKSTART, place).output_dir) / "inputs"
    values = {}
    if reward is not None:
        name = _named(reward, folder)
        values[f"reward.terms.{name.rpartition(':')[2]}"] = name
    if data is not None:
        values["data.train_files"] = [
            _named(data, folder) if callable(data) else _write(folder, _lines(data), ".jsonl")
        ]
    return [*words, *as_words(values)]


def _path_of(name: str) -> str:
    """Return the setting or section of this path, or else the setting with this last part that has
    the fewest sections. An unknown name is reported later, with similar ones.
    """
    if name in schema.settings() or name in schema.sections():
        return name
    found = [path for path in schema.settings() if path.endswith(f".{name}")]
    depth = min((path.count(".") for path in found), default=0)
    nearest = [path for path in found if path.count(".") == depth]
    if len(nearest) > 1:
        raise ConfigError(
            f"{name}: is the last part of {' and '.join(nearest)}; give one of them as"
            f" {{{nearest[0]!r}: ...}}"
        )
    return nearest[0] if nearest else name


def _lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    try:
        return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    except TypeError as error:
        raise ConfigError(f"data: a row cannot be written as JSON ({error})") from error


def _write(folder: Path, content: bytes, suffix: str) -> str:
    file = folder / f"{hashlib.sha256(content).hexdigest()[:16]}{suffix}"
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(file, content)
    return str(file)


def _named(function: Function, folder: Path) -> str:
    """Return the name of a function for a setting: where it can be imported, or else in a file with
    its source.
    """
    if not inspect.isfunction(function) or not function.__name__.isidentifier():
        raise ConfigError(f"{function!r}: is not a function with a name; define one with def")
    name = function.__name__
    module = function.__module__
    if module == "__main__" or name != function.__qualname__:
        source = "\n".join(["from __future__ import annotations", *_source(function, set())])
        return f"{_write(folder, source.encode(), '.py')}:{name}"
    # A module outside of packages may be found only by this process.
    return f"{module if '.' in module else inspect.getsourcefile(function)}:{name}"


def _source(function: FunctionType, known: set[str]) -> list[str]:
    """Return the source of a function, after the definitions that it uses. known: the names that
    are defined already.
    """
    name = function.__name__
    code = function.__code__
    known.add(name)
    if code.co_freevars:
        raise ConfigError(
            f"{name}: uses {', '.join(code.co_freevars)} of the function around it, which no other"
            f" process has; make it an argument with a default, or define {name} in a module"
        )
    try:
        text = textwrap.dedent(inspect.getsource(function))
    except OSError as error:
        raise ConfigError(f"{name}: has no source ({error}); define it in a module") from error
    scope = function.__globals__
    lines = []
    for used in sorted(set(_globals_of(code)) & scope.keys() - known):
        known.add(used)
        value = scope[used]
        if isinstance(value, FunctionType) and value.__module__ == "__main__":
            lines += _source(value, known)
        else:
            lines.append(_definition(name, used, value))
    return [*lines, text]


def _globals_of(code: CodeType) -> Iterator[str]:
    """Yield the global names that a function and the functions inside it read."""
    yield from (it.argval for it in dis.get_instructions(code) if it.opname == "LOAD_GLOBAL")
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals_of(inner)


def _definition(function: str, name: str, value: Any) -> str:
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    is_part = isinstance(value, type | FunctionType | BuiltinFunctionType)
    if is_part and value.__module__ != "__main__":
        return f"from {value.__module__} import {value.__qualname__} as {name}"
    text = repr(value)
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise ConfigError(
            f"{function}: uses {name}, a {type(value).__name__} of this program, which no other"
            f" process has; make it inside {function}, or define both in a module"
        ) from error
    return f"{name} = {text}"
