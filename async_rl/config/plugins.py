"""Functions that a configuration names: `package.module:function`, or `/path/to/file.py:function`.

Invariants: names come from the configuration, never from the wire; a name that cannot be had is a
ConfigError that names the setting. Called before anything expensive starts (preflight) and by the
processes that use the functions.  Modules beside the place where the command was given are found
too.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from async_rl.config.generation import ModelConfig
from async_rl.config.rollout import RolloutConfig
from async_rl.core.errors import ConfigError

NAME = r"^(?:[\w.]+|.+\.py):\w+$"
"""What such a setting looks like."""
_FAILURES = (
    ImportError,
    SyntaxError,
    OSError,
    ArithmeticError,
    AttributeError,
    LookupError,
    NameError,
    RuntimeError,
    TypeError,
    ValueError,
)


def load_function(setting: str, name: str, *takes: str) -> Callable[..., Any]:
    """The function `name`, which stands in `setting` and is called with what `takes` names.

    Raises ConfigError where there is no such module or function, or it cannot be called so.
    """
    place, _, function = name.rpartition(":")
    try:
        found = vars(_module(place))[function]
    except KeyError as error:
        raise ConfigError(
            f"{setting}={name}: {place} has no {function}; name a function that it defines"
        ) from error
    except _FAILURES as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{setting}={name}: {place} cannot be imported ({reason}); "
            f"name a module that is installed or stands in {Path.cwd()}, or a .py file"
        ) from error
    if not callable(found):
        raise ConfigError(f"{setting}={name}: is a {type(found).__name__}; name a function")
    try:
        inspect.signature(found).bind(*takes)
    except TypeError as error:
        call = f"{function}({', '.join(takes)})"
        raise ConfigError(
            f"{setting}={name}: is called as {call}, which it does not allow ({error}); define"
            " it so"
        ) from error
    except ValueError:  # written in C: Python cannot tell
        pass
    return found  # type: ignore[no-any-return]


def load_rollout(rollout: RolloutConfig) -> Callable[..., Awaitable[str | None]] | None:
    """The function that leads the samples, if one is named. Raises ConfigError."""
    if rollout.fn is None:
        return None
    function = load_function("rollout.fn", rollout.fn, "talk")
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"rollout.fn={rollout.fn}: is no async function; define it with async def, so that no"
            " sample waits for another"
        )
    return function


def import_external(model: ModelConfig) -> None:
    """Imports model.external_lib, if one is named, before a model is made or a tokenizer read.
    Raises ConfigError.
    """
    if model.external_lib is None:
        return
    try:
        _module(model.external_lib)
    except _FAILURES as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"model.external_lib={model.external_lib}: cannot be imported ({reason}); name one that"
            f" is installed or stands in {Path.cwd()}"
        ) from error


def short_name(name: str) -> str:
    """What people call it: the function's own name."""
    return name.rpartition(":")[2]


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        if str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(Path(place).stem, Path(place).expanduser())
    if spec is None or spec.loader is None:
        raise ImportError(f"{place} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
