"""Functions that a configuration names: `package.module:function`, or `/path/to/file.py:function`.

Invariants: names come from the configuration, never from the wire; a name that cannot be imported
is a ConfigError that names the setting.  Preflight loads the functions before anything expensive
starts.  Modules in the working directory can be imported too.
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
"""Pattern of the value of such a setting."""
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
    """Return the function `name`, the value of `setting`; it is called with the arguments `takes`.

    Raises ConfigError if the module or the function does not exist, or if its parameters do not
    accept these arguments.
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
            f"name an installed module, a module in {Path.cwd()}, or a .py file"
        ) from error
    if not callable(found):
        raise ConfigError(f"{setting}={name}: is a {type(found).__name__}; name a function")
    try:
        inspect.signature(found).bind(*takes)
    except TypeError as error:
        call = f"{function}({', '.join(takes)})"
        raise ConfigError(
            f"{setting}={name}: is called as {call}, which its parameters do not accept ({error});"
            " change its parameters"
        ) from error
    except ValueError:  # a function written in C has no signature to check
        pass
    return found  # type: ignore[no-any-return]


def load_rollout(rollout: RolloutConfig) -> Callable[..., Awaitable[str | None]] | None:
    """Return the function of `rollout.fn`, if it is set. Raises ConfigError."""
    if rollout.fn is None:
        return None
    function = load_function("rollout.fn", rollout.fn, "talk")
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"rollout.fn={rollout.fn}: is not an async function; define it with async def, so that"
            " samples run concurrently"
        )
    return function


def import_external(model: ModelConfig) -> None:
    """Import model.external_lib, if it is set, before a model is created or a tokenizer is read.

    Raises ConfigError.
    """
    if model.external_lib is None:
        return
    try:
        _module(model.external_lib)
    except _FAILURES as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"model.external_lib={model.external_lib}: cannot be imported ({reason}); name an"
            f" installed module or a module in {Path.cwd()}"
        ) from error


def short_name(name: str) -> str:
    """Return the function's name without its module."""
    return name.rpartition(":")[2]


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        if str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(Path(place).stem, Path(place).expanduser())
    if spec is None or spec.loader is None:
        raise ImportError(f"{place} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
