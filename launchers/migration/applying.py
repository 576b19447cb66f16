"""Applies the table of a source system to every key, so that none is dropped silently."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from async_rl.composition.compose import OPEN, compose
from async_rl.composition.overrides import as_words
from async_rl.composition.schema import choices_first
from async_rl.core.errors import ConfigError
from async_rl.launchers.migration import shared
from async_rl.launchers.migration.rules import (
    Fate,
    Function,
    Given,
    Rule,
    Settings,
    Source,
    Table,
    read_table,
    refused,
    same,
    translated,
)
from async_rl.launchers.migration.sources import Unreadable, arguments, read_source

_MEGATRON = {
    "linear_qkv": ["q_proj", "k_proj", "v_proj"],
    "linear_proj": ["o_proj"],
    "linear_fc1": ["gate_proj", "up_proj"],
    "linear_fc2": ["down_proj"],
}
"""Megatron's fused linear layers, as the model's own files name their parts."""


def _as_list(value: Any) -> list[Any]:
    """Return one text or several as a list, with the names of layers that models have."""
    names = [value] if isinstance(value, str) else value or []
    return [part for name in names for part in _MEGATRON.get(name, [name])]


_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "list": _as_list,
    "negated": lambda value: -value,
    "minutes": lambda value: value / 60,
}
_FILES = "async-rl migrate --data FILE --held-out FILE"
_WANTED = {
    "model.path": "the source names no model: write its path into the file",
    "data.train_files": f"the source names no file of rows: {_FILES}",
    "data.val_files": f"the source names no held-out file of rows: {_FILES}",
}
"""Without these a run would train the embedded model on the embedded task."""


class Line(msgspec.Struct, frozen=True):
    """A key of the source, its value and its fate."""

    key: str
    value: Any
    fate: Fate


class Migration(msgspec.Struct, frozen=True):
    """A translated file: the system and release that it was read as, its base configuration, the
    settings, a line per key, and what a run here does otherwise for every file of the system.
    """

    system: str
    base: str
    settings: Settings
    lines: list[Line]
    differences: list[str]


def _launched(migration: Migration) -> Migration:
    """Leave out the settings that no launch would accept, and report them."""
    settings = migration.settings
    lines = migration.lines
    while problem := _problem(migration.base, settings):
        if "longest sequence" in problem:
            # Memory only: gradients do not depend on it.
            settings["learner.budget_tokens"] = sum(
                settings[f"data.max_{part}_tokens"] for part in ("prompt", "response")
            )
            continue
        if problem.startswith("learner.ranks=") and "learner.ranks" not in settings:
            # The nodes would have more ranks than a minibatch has groups, whatever the file says.
            settings["learner.ranks"] = settings.get("learner.context_ranks", 1)
            continue
        # A message starts with the setting or the section that it is about.
        subject = problem.partition("=")[0]
        named = [path for path in settings if f"{path}.".startswith(f"{subject}.")]
        if not named:
            raise ConfigError(problem)
        settings = {path: value for path, value in settings.items() if path not in named}
        lines = [_without(line, named, problem) for line in lines]
    for path, reason in _WANTED.items():
        # Without the key, which was refused, the base decides, and it evaluates.
        is_wanted = path != "data.val_files" or settings.get("evaluation.every_steps", True)
        if is_wanted and not settings.get(path):
            settings[path] = OPEN
            lines.append(Line(path, OPEN, refused(reason)))
    ordered = choices_first(settings.items())
    return msgspec.structs.replace(migration, settings=ordered, lines=lines)


def _problem(base: str, settings: Settings) -> str:
    """The first problem that a launch has with the settings; empty if it has none."""
    # Files are opened only to count the steps of epochs; what the source lacks is named later.
    files = {"data.train_files": ["a.jsonl"], "data.val_files": ["b.jsonl"]}
    steps = settings.get("num_steps") or 10**6
    try:
        compose(base, as_words({"model.path": "m", **files, **settings, "num_steps": steps}))
    except ConfigError as error:
        return str(error).partition("\n")[0]
    return ""


def _without(line: Line, paths: Sequence[str], problem: str) -> Line:
    """The line without some settings; the report has it at the top unless the chosen variant lacks
    them.
    """
    fate = line.fate
    settings = {path: value for path, value in fate.settings.items() if path not in paths}
    if settings == fate.settings:
        return line
    if "which belongs to" not in problem:
        fate = refused(f"not possible here: {problem}", settings)
    elif settings:
        fate = translated(settings, fate.reason)
    else:
        fate = same(f"without effect: {problem}")
    return msgspec.structs.replace(line, fate=fate)


def _fate(key: str, source: Source, table: Table, code: Mapping[str, Function]) -> Fate:
    value = source[key]
    pattern, rule = table.rule_of(key)
    # Where no value changes anything, it need not be known.
    if isinstance(value, Unreadable) and rule != Rule(same=rule.same):
        return refused(f"cannot be read: {value.reason}")
    # Before all other columns: a key without effect must not be refused.
    if rule.if_:
        condition = table.conditions[rule.if_]
        if source.get(condition.key, condition.default) != condition.value:
            return same(condition.reason)
    if value == OPEN:
        return same("the source takes it from its command line")
    if value in rule.only:
        return same(rule.same or "the source's default")
    given = Given(key=key, value=value, source=source, rule=rule)
    if rule.code:
        try:
            return code[rule.code](given)
        except (TypeError, ValueError, KeyError) as error:
            # A text or a list where the source's program expects a number, for example.
            return refused(f"the value does not have the expected form ({error})")
    if rule.as_:
        other = rule.as_.replace("*", key.removeprefix(pattern.removesuffix("*")))
        if value == source.get(other, value):
            return same(rule.same or f"equal to {other}; both are one setting here")
        return refused(rule.refused or f"differs from {other}, but both are one setting here")
    # Lists and sections cannot be keys of a mapping.
    if isinstance(value, Hashable) and value in rule.cases:
        return translated(rule.cases[value], rule.note)
    # Values that need no setting are answered; others are refused unless `to` is there.
    if rule.only and not rule.to:
        return refused(rule.refused or rule.same)
    if rule.to:
        return given.into(_CONVERTERS[rule.by](value) if rule.by else value, rule.note)
    return same(rule.same) if rule.same else refused(rule.refused or "it has no counterpart")


SYSTEMS = ("verl", "areal", "areal_now", "trl")
"""Each has a table, `<name>.yaml`, and a module with the functions that the table names; the first
that recognizes a source is it.
"""


def read(
    file: Path, overrides: Sequence[str] = (), *, release: str = "", given: Settings | None = None
) -> Migration:
    """Translate a file: apply the table of its system to every key, and to the absent keys that
    decide results. Raises ConfigError if no system is recognized.

    release: name of the release whose defaults absent keys have; given: settings that win.
    """
    tables = {name: read_table(name) for name in SYSTEMS}
    recognized = [
        (source, name)
        for source in read_source(file, overrides)
        for name, table in tables.items()
        if table.recognizes(source)
    ]
    if not recognized:
        raise ConfigError(f"{file}: of no system that migrate knows by its keys (docs/migrate.md)")
    source, name = recognized[0]
    table = tables[name]
    if recognized[-1][0] is not source:
        source["the script"] = Unreadable("it starts several runs; this is the first")
    # A module serves the tables of one system, as areal.py those of areal.yaml and areal_now.yaml.
    module = import_module(f"{__package__}.{name.partition('_')[0]}")
    code = vars(shared) | vars(module)
    source |= arguments(overrides)
    defaults = table.release_of(source, release)
    # A key that the file omits has the default of its system, which may differ from ours.
    absent = {key: value for key, value in defaults.absent.items() if key not in source}
    complete = {**absent, **source}
    lines = [Line(f"every run of {table.title}", "", translated(table.always))]
    # Of two keys with the same setting the later in the table wins, whatever their order here.
    order = {pattern: position for position, pattern in enumerate(table.rules)}
    for key in sorted(complete, key=lambda key: order.get(table.rule_of(key)[0], 0)):
        shown = f"{key} (absent)" if key in absent else key
        lines.append(Line(shown, complete[key], _fate(key, complete, table, code)))
    settings: Settings = {}
    for line in lines:
        settings.update(line.fate.settings)
    settings |= given or {}
    # The base decides settings that no key names; a critic needs those of PPO.
    base = "ppo_code" if settings.get("algorithm.advantage") == "gae" else "grpo_code"
    system = f"{table.title} {defaults.name}"
    return _launched(Migration(system, base, settings, lines, table.differences))
