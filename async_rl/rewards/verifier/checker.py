"""Checkers: a function that the configuration names, or a program that a row brings.

`sandbox.checker=module:function` is trusted code of the person who runs the verifier: the
configuration names it, a request cannot, and it runs here. A program of a row runs in the jail.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from async_rl.config.plugins import CHECKER, load_function
from async_rl.core.errors import ConfigError, InfrastructureError
from async_rl.sandbox.comparison import shorten

Checker = Callable[[Any, Any, Any], bool]
"""(input text or list of arguments, program's output, expected output) -> True if it passes."""


def load_checker(name: str | None) -> Checker | None:
    """The function that `sandbox.checker` names, as module:function. Raises ConfigError."""
    if name is None:
        return None
    return load_function("sandbox.checker", name, CHECKER)


def load_headers(directory: str | None) -> dict[str, str]:
    """The files of `sandbox.checker_headers` by name. Raises ConfigError."""
    if directory is None:
        return {}
    try:
        files = [file for file in Path(directory).iterdir() if file.is_file()]
        return {file.name: file.read_text(encoding="utf-8") for file in files}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"sandbox.checker_headers={directory}: {error}; give a directory with only headers"
        ) from error


def ask(checker: Checker, given: Any, value: Any, expected: Any) -> bool:
    """The function's answer. Raises InfrastructureError if it has none."""
    try:
        answer = checker(given, value, expected)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        OSError,
        RecursionError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise InfrastructureError(
            f"the checker raised {type(error).__name__}: {str(error)[:200]}; correct"
            " sandbox.checker"
        ) from error
    if type(answer) is not bool:
        raise InfrastructureError(
            f"the checker returned {shorten(answer)}, not True or False; correct sandbox.checker"
        )
    return answer
