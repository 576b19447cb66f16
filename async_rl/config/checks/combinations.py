"""The combinations of settings that combinations.yaml refuses.

Part of `checks/run.py`, whose invariants hold here.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from async_rl.config.base import Section, show
from async_rl.config.run import RunConfig
from async_rl.core.records import read_packaged

_RELATIONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "is": operator.eq,
    "is not": operator.ne,
    "above": operator.gt,
    "above twice": lambda value, other: value > 2 * other,
    "above the next of": lambda value, other: value > other + 1,
    "not above": operator.le,
    "not above minus": lambda value, other: value <= -other,
    "below": operator.lt,
    "not below": operator.ge,
    "in": lambda value, values: value in values,
    "not in": lambda value, values: value not in values,
    "does not divide": lambda value, other: other % value != 0,
    "no multiple of": lambda value, other: value % other != 0,
}


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A refused combination: its conditions, and the reason with the remedy.

    when: the path of a setting, a relation, and a value or the path of another setting.
    """

    when: list[tuple[str, str, Any]]
    because: str


@functools.cache
def rows() -> list[Row]:
    """The rows of combinations.yaml."""
    return read_packaged(__package__, "combinations.yaml", list[Row])


def combination_problems(config: RunConfig) -> Iterator[str]:
    """Yield a line for each row whose conditions hold."""
    values = dict(_by_path(config, ""))
    for row in rows():
        shown = _matching(row, values)
        if shown:
            first, *others = shown
            with_others = f" with {', '.join(others)}" if others else ""
            yield f"{first}{with_others}: {row.because}"


def _matching(row: Row, values: Mapping[str, Any]) -> list[str]:
    """The settings that the row compares, as path=value; none if a condition does not hold."""
    compared: dict[str, Any] = {}
    for path, relation, other in row.when:
        is_setting = isinstance(other, str) and (other in values or "." in other)
        paths = [path, other] if is_setting else [path]
        if not values.keys() >= set(paths):
            return []
        compared |= {each: values[each] for each in paths}
        if is_setting:
            other = values[other]
        if not _RELATIONS[relation](values[path], other):
            return []
    return [f"{path}={show(value)}" for path, value in compared.items()]


def _by_path(section: Section, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the settings by path; a choice has the name of its variant."""
    for name, value in section:
        if isinstance(value, Section):
            yield from _by_path(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}".removesuffix(".kind"), value
