"""Applies the table of a source system to every key, so that none is dropped silently."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import msgspec

from async_rl.composition.choices import Tree, choices_first, expand, put
from async_rl.composition.compose import as_written
from async_rl.composition.schema import KIND, find
from async_rl.launchers.migration.rules import (
    NO_RULE,
    Fate,
    Function,
    Given,
    Rule,
    Settings,
    Source,
    Table,
    refused,
    same,
    split_at,
    translated,
)

_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "list": lambda value: [value] if isinstance(value, str) else list(value or []),
    "negated": lambda value: -value,
    "minutes": lambda value: value / 60,
    "not_negative": lambda value: max(value, 0),
    "zero_if_null": lambda value: value or 0.0,
}
_OPEN = "???"
"""OmegaConf's mark of a value that the command line has to give."""


class Line(msgspec.Struct, frozen=True):
    """A key of the source, its value and its fate."""

    key: str
    value: Any
    fate: Fate


class Migration(msgspec.Struct, frozen=True):
    """A translated file: its base configuration, the settings that differ, a line per key."""

    base: str
    settings: Settings
    lines: list[Line]


def migrate(source: Source, table: Table, code: Mapping[str, Function]) -> Migration:
    """Apply the table to every key of the source and to the implied keys that it omits.

    code: the functions that the table names.
    """
    # A key that the file omits has the default of its system, which may differ from ours.
    absent = {key: value for key, value in table.implied.items() if key not in source}
    complete = {**absent, **source}
    lines = [
        Line(key, value, _fate(key, value, complete, table, code)) for key, value in source.items()
    ]
    for key, value in absent.items():
        lines.append(Line(f"{key} (absent)", value, _fate(key, value, complete, table, code)))
    settings: Settings = {}
    for line in lines:
        settings.update(line.fate.settings)
    # The base decides settings that no key names; a critic needs those of PPO.
    base = "ppo_code" if settings.get("algorithm.advantage") == "gae" else "grpo_code"
    tree = as_written(base)
    # In place of the order of the file, in which a parameter may precede its choice.
    for path, value in choices_first(settings.items()):
        put(tree, path, value)
    expand(tree)
    foreign = {path: _other_variant(tree, path) for path in settings}
    lines = [msgspec.structs.replace(line, fate=_effective(line.fate, foreign)) for line in lines]
    kept = [(path, value) for path, value in settings.items() if foreign[path] is None]
    return Migration(base, dict(choices_first(kept)), lines)


def _other_variant(tree: Tree, path: str) -> str | None:
    """Return the choice above a setting whose chosen variant does not have it, as `path=variant`;
    None if the setting has an effect.
    """
    choice, *below = path.split(".")
    node = tree[choice]
    for name in below:
        setting = find(f"{choice}.{name}")
        if setting is not None and setting.variants and node[KIND] not in setting.variants:
            return f"{choice}={node[KIND]}"
        choice = f"{choice}.{name}"
        node = node.get(name)
    return None


def _effective(fate: Fate, foreign: Mapping[str, str | None]) -> Fate:
    """The fate without parameters that the chosen variant does not have."""
    kept = {path: value for path, value in fate.settings.items() if foreign[path] is None}
    if kept or not fate.settings:
        return msgspec.structs.replace(fate, settings=kept)
    # The person should see which key made it useless.
    causes = ", ".join(sorted({str(foreign[path]) for path in fate.settings}))
    return same(f"without effect: {causes}")


def _fate(key: str, value: Any, source: Source, table: Table, code: Mapping[str, Function]) -> Fate:
    pattern, rule = table.rule_of(key)
    condition = table.conditions[rule.if_] if rule.if_ else None
    # Before all other columns: a key without effect must not be refused.
    if condition is not None and not condition.is_met(source):
        return same(condition.reason)
    if rule.switch or rule.defaults:
        section, below = split_at(key, pattern)
        switch = f"{section}{rule.switch}"
        if rule.switch and not source.get(switch):
            return same(f"without effect: {switch} is not set")
        if rule.defaults:
            return _unchanged(rule, below, value)
    if rule.if_null and value is None:
        return same(rule.if_null)
    if value == _OPEN:
        return same("the source takes it from its command line")
    given = Given(key=key, value=value, source=source, rule=rule)
    if rule.code:
        try:
            return code[rule.code](given)
        except (TypeError, ValueError, KeyError) as error:
            # A text or a list where the source's program expects a number, for example.
            return refused(f"the value does not have the expected form ({error})")
    if rule.as_:
        return _as_another(rule, value, source, split_at(key, pattern)[1])
    return _translated(given)


def _translated(given: Given) -> Fate:
    """The fate by the columns that need no code."""
    rule = given.rule
    value = given.value
    # Lists and sections cannot be keys of a mapping.
    is_listed = isinstance(value, Hashable) and value in (rule.cases or rule.choices)
    if rule.cases and is_listed:
        return translated(rule.cases[value], rule.note)
    if rule.only and value in rule.only:
        return same(rule.same or "the source's default")
    # Other values are refused unless `to` has a setting for them.
    if rule.only and not rule.to:
        return refused(rule.refused or rule.same)
    if rule.choices:
        if not is_listed:
            return refused(f"{value} has no counterpart; {rule.refused}")
        return translated(dict.fromkeys(rule.targets, rule.choices[value]), rule.note)
    if rule.to:
        converted = _CONVERTERS[rule.by](value) if rule.by else value
        settings = {**dict.fromkeys(rule.targets, converted), **rule.also}
        for path, other in rule.from_.items():
            settings[path] = given.sibling(other, None) or value
        return translated(settings, rule.note)
    return same(rule.same) if rule.same else refused(rule.refused)


def _unchanged(rule: Rule, below: str, value: Any) -> Fate:
    if below not in rule.defaults:
        return refused(NO_RULE)
    default = rule.defaults[below]
    if value == default:
        return same(rule.same or "the source's default")
    return refused(rule.refused or f"only the source's default, {default}, is possible here")


def _as_another(rule: Rule, value: Any, source: Source, below: str) -> Fate:
    other = rule.as_.replace("*", below)
    if value in rule.only or value == source.get(other, value):
        return same(rule.same or f"equal to {other}; both are one setting here")
    return refused(rule.refused or f"differs from {other}, but both are one setting here")
