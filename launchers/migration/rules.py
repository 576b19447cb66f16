"""From the configuration of another system to ours, key by key, so that none goes unmentioned.

A system is a table of rules: the dotted key, or `section.*`, and what becomes of its value. Each
key ends as translated (settings of ours are written), defaulted (what ours does anyway, with the
reason) or refused (its meaning would be lost, with the reason). Invariants: a key without a rule is
refused; the first rule that fits decides, exact keys before sections; nothing is dropped silently.
Used by `async-rl migrate`; the tables are in migration_verl.py and migration_areal.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

Settings = dict[str, Any]
Source = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one key: settings of ours, and the reason in words."""

    kind: Literal["translated", "defaulted", "refused"]
    reason: str = ""
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Line:
    """A key of the source, its value and its fate."""

    key: str
    value: Any
    fate: Fate


Rule = Callable[[Any, Source], Fate]


@dataclass(frozen=True, slots=True)
class Migration:
    """A whole file: the configuration of ours that it builds on, the settings that differ, and one
    line per key.
    """

    base: str
    settings: Settings
    lines: list[Line]


def to(*paths: str, by: Callable[[Any], Any] = lambda value: value) -> Rule:
    """The value, converted, under each of the paths."""
    return lambda value, _: Fate("translated", settings={path: by(value) for path in paths})


def choice(path: str, names: Mapping[Any, Any], remedy: str) -> Rule:
    """The value under another name; one without a name is refused."""

    def rule(value: Any, _: Source) -> Fate:
        if value in names:
            return Fate("translated", settings={path: names[value]})
        return Fate("refused", f"ours has no such choice; {remedy}")

    return rule


def same(reason: str) -> Rule:
    """Whatever the value, ours does what is meant."""
    return lambda _, __: Fate("defaulted", reason)


def only(values: tuple[Any, ...], kept: str, refused: str) -> Rule:
    """Ours does what these values mean, and cannot do what others mean."""
    return lambda value, _: Fate("defaulted", kept) if value in values else Fate("refused", refused)


def never(reason: str) -> Rule:
    """Not here, whatever the value."""
    return lambda _, __: Fate("refused", reason)


def unless_null(rule: Rule, reason: str) -> Rule:
    """The rule, except for null, of which ours makes the same."""
    return lambda value, source: Fate("defaulted", reason) if value is None else rule(value, source)


def when(key: str, value: Any, rule: Rule, reason: str) -> Rule:
    """The rule where another key has that value; without effect elsewhere."""
    return lambda own, source: (
        rule(own, source) if source.get(key) == value else Fate("defaulted", reason)
    )


def to_wandb(project: Any) -> Fate:
    """The numbers go to Weights & Biases too, where that is installed."""
    if find_spec("wandb") is None:
        return Fate(
            "refused",
            f"wandb is not installed here; pip install wandb and set monitoring.wandb={project}",
        )
    return Fate("translated", settings={"monitoring.wandb": str(project)})


def several_machines(gpus: str) -> Rule:
    """The number of machines: more than one are a Ray cluster of machines with so many GPUs each.
    gpus: the key that says how many.
    """

    def rule(value: Any, source: Source) -> Fate:
        if value == 1:
            return Fate("defaulted", "one machine")
        settings = {
            "launcher": "ray",
            "cluster.nodes": value,
            "cluster.gpus_per_node": source.get(gpus, 8),
        }
        return Fate("translated", f"ray start on {value} machines", settings)

    return rule


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted key; an empty mapping is a leaf, so that it is mentioned too."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        leaves.update(flat(value, f"{prefix}.{name}" if prefix else str(name)))
    return leaves


def migrate(
    source: Source, rules: Mapping[str, Rule], implied: Mapping[str, Any], base: str
) -> Migration:
    """Apply the rules to every key. implied: keys whose value counts where the source does not name
    them, because ours differs there.
    """
    lines = [Line(key, value, _rule(key, rules)(value, source)) for key, value in source.items()]
    absent = {key: value for key, value in implied.items() if key not in source}
    lines += [
        Line(f"{key} (absent)", value, _rule(key, rules)(value, {**absent, **source}))
        for key, value in absent.items()
    ]
    settings: Settings = {}
    for line in lines:
        settings.update(line.fate.settings)
    return Migration(base, settings, lines)


def _rule(key: str, rules: Mapping[str, Rule]) -> Rule:
    if key in rules:
        return rules[key]
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        if (section := f"{'.'.join(parts[:length])}.*") in rules:
            return rules[section]
    return never(
        "no rule for it: ours has no such setting, or it is newer than this table; check what it"
        " does"
    )
