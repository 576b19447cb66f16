"""Packages that only a part of the product needs, and the extra that installs each.

Invariant: a feature whose package is missing is refused before anything starts, by a message that
names the extra.
"""

from __future__ import annotations

import importlib.util

from async_rl.core.errors import ConfigError

EXTRA_OF = {
    "ray": "ray",
    "starlette": "verifier",
    "torch": "cpu",
    "transformers": "cpu",
    "uvicorn": "verifier",
    "vllm": "cpu",
    "wandb": "wandb",
}
"""The extra with each package. GPU machines install `gpu` instead of `cpu`."""


def missing(package: str, feature: str) -> str | None:
    """Return the problem if `feature` cannot be used without this package; None if it is there."""
    if importlib.util.find_spec(package) is not None:
        return None
    extra = EXTRA_OF.get(package)
    install = f"pip install 'async-rl[{extra}]'" if extra else f"pip install {package}"
    if extra == "cpu":
        install += ", or 'async-rl[gpu]' on a machine with GPUs"
    return f"{feature}: the package {package} is not installed; {install}"


def require(package: str, feature: str) -> None:
    """Raise ConfigError if `feature` cannot be used without this package."""
    problem = missing(package, feature)
    if problem is not None:
        raise ConfigError(problem)
