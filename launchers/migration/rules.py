"""The table of one source system: what becomes of each key of its configuration.

A table is a yaml file of this package: the dotted key, or a pattern with `*`, and how its value is
translated. The result of a key is one of
- translated: settings of this project are written;
- defaulted: this project does the same without a setting, and the reason says how;
- refused: the meaning would be lost, and the reason says what to do.
An exact key wins over `*.part.*`, that over `section.*`, and an inner section over an outer one.
A key without a rule is refused.
"""

import functools
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

import msgspec

from async_rl.core.errors import ConfigError
from async_rl.core.frozen import Value
from async_rl.core.records import read_packaged

Settings = dict[str, Any]
Source = Mapping[str, Any]
NO_RULE = "no rule for it: look for it in docs/configuration.md"


class Fate(Value):
    """The result of one key: settings of this project, and the reason."""

    kind: Literal["translated", "defaulted", "refused"]
    reason: str = ""
    settings: Settings = {}


def translated(settings: Settings, note: str = "") -> Fate:
    """Return the fate of a key that becomes these settings."""
    return Fate("translated", note, settings)


def same(reason: str) -> Fate:
    """Return the fate of a key that needs no setting."""
    return Fate("defaulted", reason)


def refused(reason: str, settings: Settings | None = None) -> Fate:
    """Return the fate of a key whose meaning would be lost, with the settings that are nearest."""
    return Fate("refused", reason, settings or {})


class Condition(Value):
    """Another key that must have `value`; `default` is used if the source does not name it."""

    key: str
    value: Any
    default: Any
    reason: str


class Rule(Value):
    """One line of a table. The columns apply in this order; the first that decides wins."""

    if_: str = msgspec.field(default="", name="if")
    """Name of a condition; the key has no effect unless it is met."""
    only: list[Any] = []
    """Values that need no setting; others are refused."""
    code: str = ""
    """Name of the function that decides."""
    cases: dict[Any, Settings] = {}
    """Settings by value; other values are `same` or `refused`."""
    as_: str = msgspec.field(default="", name="as")
    """Another key (`*` = the text that the pattern's `*` matched); the same value needs no setting,
    another value is refused."""
    to: list[str] = []
    """Settings that receive the value."""
    by: Literal["", "list", "minutes", "negated"] = ""
    """Converter of the value for `to`."""
    also: Settings = {}
    """Further settings that go with `to`."""
    same: str = ""
    """Reason why no setting is needed, whatever the value is."""
    refused: str = ""
    """Reason of a refusal; `same` if empty."""
    note: str = ""
    """Reason of a translation."""


class Given(Value):
    """The argument of a rule's function."""

    key: str
    value: Any
    source: Source
    rule: Rule

    def sibling(self, name: str, default: Any) -> Any:
        """Return the value of another key of the same section."""
        section = self.key.rpartition(".")[0]
        return self.source.get(f"{section}.{name}" if section else name, default)

    def into(self, value: Any, note: str = "") -> Fate:
        """Return the fate that writes this value to the rule's settings."""
        return translated({**dict.fromkeys(self.rule.to, value), **self.rule.also}, note)


Function = Callable[[Given], Fate]


class Release(Value):
    """Releases of a system with the same defaults.

    marks: keys that only their files have; absent: the values of the keys that decide results, for
    files that omit them.
    """

    name: str
    absent: dict[str, Any]
    marks: list[str] = []


class Table(Value):
    """The rules of one system.

    marks: lists of keys or sections; a source that has all of one list is of this system. releases:
    the newest is the last. always: settings for what the system does whatever its keys are.
    differences: what a run here does otherwise for every file. texts: anchors of the yaml file.
    """

    title: str
    marks: list[list[str]]
    texts: list[str]
    conditions: dict[str, Condition]
    releases: list[Release]
    always: Settings
    differences: list[str]
    rules: dict[str, Rule]

    def recognizes(self, source: Source) -> bool:
        """Return whether the source has the keys and sections of this system."""
        names = {key.partition(".")[0] for key in source} | source.keys()
        return any(names.issuperset(marks) for marks in self.marks)

    def release_of(self, source: Source, wanted: str) -> Release:
        """Return the named release, that whose marks the source has, or the newest.

        Raises ConfigError for a name that the table does not have.
        """
        names = {name: each for each in self.releases for name in each.name.split()}
        # A release such as 0.18.2 has the defaults of 0.18.
        name = next((name for name in names if f"{wanted}.".startswith(f"{name}.")), "")
        if wanted and not name:
            raise ConfigError(f"--release {wanted}: {self.title} has {', '.join(names)} here")
        marked = (each for each in self.releases if source.keys() & set(each.marks))
        return names[name] if name else next(marked, self.releases[-1])

    def rule_of(self, key: str) -> tuple[str, Rule]:
        """Return the rule of a key, and the pattern of the table that matched it."""
        # An exact key wins over every pattern.
        if key in self.rules:
            return key, self.rules[key]
        # An empty section is a key itself; the patterns of its content apply to it.
        matching = [
            pattern
            for pattern in self.rules
            if "*" in pattern and (fnmatchcase(key, pattern) or fnmatchcase(f"{key}.", pattern))
        ]
        if not matching:
            return key, Rule(refused=NO_RULE)
        # Of two sections the longer one is the inner one; the name of a key says more than both.
        best = max(
            matching,
            key=lambda pattern: (pattern.startswith("*."), not pattern.endswith("*"), len(pattern)),
        )
        return best, self.rules[best]


@functools.cache
def read_table(system: str) -> Table:
    """Read `<system>.yaml` of this package. Raises msgspec.ValidationError if it is malformed."""
    return read_packaged(__package__, f"{system}.yaml", Table)
