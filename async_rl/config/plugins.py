"""Plug-ins: functions that a configuration names as `package.module:function`, as
`/path/to/file.py:function`, or by the name of an entry point of an installed package.

Invariants: names come from the configuration, never from the wire; a name that cannot be imported
is a ConfigError that names the setting.  Preflight loads the functions before anything expensive
starts.  Modules in the working directory can be imported too.
"""

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from async_rl.config.base import is_function
from async_rl.config.generation import ENGINES, EXTERNAL, SERVICE, ModelConfig, RolloutConfig
from async_rl.core.errors import ConfigError
from async_rl.core.frozen import frozen

# The code of a user may raise these during its import. Not Exception, which would also hide
# errors of this project.
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


@frozen
class Kind:
    """A kind of plug-in. group: of its entry points; takes: its arguments by position; named: its
    arguments by keyword; offered: more arguments by keyword, for a function that has a parameter
    of that name; built_in: the other names of the setting. async_rl/plugins.py has their
    types.
    """

    group: str
    takes: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    offered: tuple[str, ...] = ()
    built_in: tuple[str, ...] = ()


REWARD = Kind(group="async_rl.rewards", takes=("sample",))
AGENT = Kind(group="async_rl.agents", takes=("task", "endpoint"))
ROLLOUT = Kind(group="async_rl.rollouts", takes=("talk",), built_in=(EXTERNAL, SERVICE))
ENGINE = Kind(
    group="async_rl.engines", takes=("config", "model_path"), named=("seed",), built_in=ENGINES
)
POLICY_LOSS = Kind(
    group="async_rl.policy_losses",
    takes=("log_ratio",),
    named=("advantages", "behavior_weight", "sequences"),
    offered=("policy_logprobs", "behavior_logprobs"),
)
ADVANTAGE = Kind(group="async_rl.advantages", takes=("rewards",), named=("groups",))
GRADIENT = Kind(group="async_rl.gradients", takes=("pieces",))
CORRECTION = Kind(group="async_rl.corrections", takes=("log_ratio",), named=("sequences",))
SELECTION = Kind(
    group="async_rl.selections",
    takes=("choice",),
    built_in=("shuffled", "sequential", "pools", "priority"),
)
DATA_SOURCE = Kind(group="async_rl.data_sources")


def is_plugin(name: str, kind: Kind) -> bool:
    """Return whether this names a function, or an entry point of this kind."""
    return is_function(name) or bool(metadata.entry_points(group=kind.group, name=name))


def load_function(setting: str, name: str, kind: Kind) -> Callable[..., Any]:
    """Return the plug-in `name`, the value of `setting`.

    Raises ConfigError if the entry point, the module or the function does not exist, or if its
    parameters do not accept the arguments of its kind.
    """
    module, _, function = _target(setting, name, kind).rpartition(":")
    imported = _imported(f"{setting}={name}: {module}", module)
    # Not getattr: the __getattr__ of a module may return something for a misspelled name.
    found = vars(imported).get(function)
    if not callable(found):
        raise ConfigError(
            f"{setting}={name}: {module} has no function {function}; name one that it defines"
        )
    try:
        # Checked here, because the first call comes minutes later, in a process on another node.
        named = [*kind.named, *wanted(found, kind)]
        inspect.signature(found).bind(*kind.takes, **dict.fromkeys(named))
    except TypeError as error:
        words = [*kind.takes, *(f"{name}=..." for name in kind.named)]
        call = f"{function}({', '.join(words)})"
        raise ConfigError(
            f"{setting}={name}: is called as {call}, which its parameters do not accept ({error});"
            " change its parameters"
        ) from error
    except ValueError:  # a function written in C has no signature to check
        pass
    return found  # type: ignore[no-any-return]


load_once = functools.cache(load_function)
"""As load_function, for a plug-in that is used many times: a file is executed once."""


def wanted(function: Callable[..., Any], kind: Kind) -> list[str]:
    """Return the offered arguments for which this plug-in has a parameter."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a function written in C has no signature
        return []
    return [name for name in kind.offered if name in parameters]


def _target(setting: str, name: str, kind: Kind) -> str:
    """Return `module:function` of a name, which may name an entry point."""
    if is_function(name):
        return name
    entry_points = metadata.entry_points(group=kind.group)
    if name not in entry_points.names:
        known = "".join(f"{word}, " for word in (*kind.built_in, *sorted(entry_points.names)))
        raise ConfigError(
            f"{setting}={name}: must be {known}or a function as package.module:function or"
            f" file.py:function; no installed package has this entry point of {kind.group}"
        )
    return entry_points[name].value


def load_rollout(rollout: RolloutConfig) -> Callable[..., Awaitable[str | None]] | None:
    """Return the function of `rollout.fn`, if it is set. Raises ConfigError."""
    # An agent runs in separate processes, which import it there.
    if rollout.fn is None or rollout.agent.is_used:
        return None
    assert isinstance(rollout.fn, str), "a list is an agent"
    function = load_function("rollout.fn", rollout.fn, ROLLOUT)
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
    if model.external_lib is not None:
        _imported(f"model.external_lib={model.external_lib}:", model.external_lib)


def _imported(subject: str, module: str) -> ModuleType:
    """Import a module, or the file of a path. Raises ConfigError, which starts with the subject."""
    try:
        return _module(module)
    except _FAILURES as error:
        raise ConfigError(
            f"{subject} cannot be imported ({type(error).__name__}: {error}); name an installed"
            f" module, a module in {Path.cwd()}, or a .py file"
        ) from error


def _module(name: str) -> ModuleType:
    if not name.endswith(".py"):
        if str(Path.cwd()) not in sys.path:
            # At the end: a file in the working directory must not replace an installed package.
            sys.path.append(str(Path.cwd()))
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(Path(name).stem, Path(name).expanduser())
    if spec is None or spec.loader is None:
        raise ImportError(f"{name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Before its code runs: a dataclass in the file looks up its module by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
