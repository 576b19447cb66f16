"""Checker functions that tests name in `sandbox.checker`."""

from __future__ import annotations

from typing import Any

not_callable = 3


def any_order(given: Any, got: Any, expected: Any) -> bool:
    if isinstance(got, str):
        return sorted(got.split()) == sorted(expected.split())
    return sorted(got) == sorted(expected)


def echoes_the_input(given: Any, got: Any, expected: Any) -> bool:
    return bool(got.strip() == given.strip()) if isinstance(given, str) else bool(got == given)


def broken(given: Any, got: Any, expected: Any) -> bool:
    raise ValueError("no idea")


def vague(given: Any, got: Any, expected: Any) -> Any:
    return 1
