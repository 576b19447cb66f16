"""Asynchronous reinforcement learning of language models.

    run = async_rl.launch("grpo_code", {"num_steps": 20})
    for step in run.steps():
        print(step["reward/mean"])

The names in `__all__` are public: docs/python.md has all of them, and what their versions
promise.
Importing this package is light; a name loads its module when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from async_rl.core.errors import (
        AsyncRLError,
        ConfigError,
        DeadlineExceeded,
        InfrastructureError,
        RunFailed,
    )
    from async_rl.launchers.api.launching import launch
    from async_rl.launchers.api.run import Run, open_run, resume
    from async_rl.launchers.api.session import Session
    from async_rl.launchers.api.verifier import Verifier
    from async_rl.runs.samples import Sample
    from async_rl.runs.status import RunState, RunStatus
    from async_rl.service.proto import Datum, Drawn

__version__ = "0.1.0"

__all__ = [
    "AsyncRLError",
    "ConfigError",
    "Datum",
    "DeadlineExceeded",
    "Drawn",
    "InfrastructureError",
    "Run",
    "RunFailed",
    "RunState",
    "RunStatus",
    "Sample",
    "Session",
    "Verifier",
    "__version__",
    "launch",
    "open_run",
    "resume",
]

_MODULES = {
    "AsyncRLError": "core.errors",
    "ConfigError": "core.errors",
    "Datum": "service.proto",
    "DeadlineExceeded": "core.errors",
    "Drawn": "service.proto",
    "InfrastructureError": "core.errors",
    "Run": "launchers.api.run",
    "RunFailed": "core.errors",
    "RunState": "runs.status",
    "RunStatus": "runs.status",
    "Sample": "runs.samples",
    "Session": "launchers.api.session",
    "Verifier": "launchers.api.verifier",
    "launch": "launchers.api.launching",
    "open_run": "launchers.api.run",
    "resume": "launchers.api.run",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(importlib.import_module(f"{__name__}.{_MODULES[name]}"))[name]


def __dir__() -> list[str]:
    return __all__
