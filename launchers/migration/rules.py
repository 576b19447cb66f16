"""Translation of another system's configuration, key by key, so that no key is dropped silently.

A system is a table of rules (verl.yaml, areal.yaml): the dotted key, or `section.*`, and how its
value is translated. The result of a key is one of
- translated: settings of this project are written;
- defaulted: this project does the same without a setting, and the reason says how;
- refused: the meaning would be lost, and the reason says what to do.
Exact keys win over sections and longer sections over shorter ones. A key without a rule is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from importlib import resources
from importlib.util import find_spec
from typing import Any, Literal

import msgspec

from async_rl.launchers.configuration.choices import choices_first, drop_if_foreign, expand, put
from async_rl.launchers.configuration.compose import as_written

Settings = dict[str, Any]
Source = Mapping[str, Any]
_STEPS = ("exp_ctrl.benchmark_steps", "trainer.total_training_steps")
_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "list": lambda value: [value] if isinstance(value, str) else list(value or []),
    "minutes": lambda value: value / 60,
    "not_negative": lambda value: max(value, 0),
    "zero_if_null": lambda value: value or 0.0,
}


class Fate(msgspec.Struct, frozen=True):
    """The result of one key: settings of this project, and the reason."""

    kind: Literal["translated", "defaulted", "refused"]
    reason: str = ""
    settings: Settings = {}


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


class Condition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another key that must have `value`; `default` is used if the source does not name it."""

    key: str
    value: Any
    default: Any
    reason: str

    def is_met(
        self,
        source: Source,
    ) -> bool:
        """Return whether the source has the value."""
        return bool(source.get(self.key, self.default) == self.value)


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a table. The columns apply in this order; the first that decides wins."""

    if_: str = msgspec.field(default="", name="if")
    """Name of a condition; the key has no effect unless it is met."""
    if_null: str = ""
    """Reason why null needs no setting."""
    code: str = ""
    """Name of the function that decides."""
    cases: dict[Any, Settings] = {}
    """Settings by value; other values are `same` or `refused`."""
    only: list[Any] = []
    """Values that need no setting; others are refused."""
    as_: str = msgspec.field(default="", name="as")
    """Another key; the same value needs no setting, another one is refused."""
    choices: dict[Any, Any] = {}
    """The value's name here, for `to`; a value without a name is refused."""
    to: str | list[str] = []
    """Settings that receive the value."""
    by: Literal["", "list", "minutes", "not_negative", "zero_if_null"] = ""
    """Converter of the value for `to`."""
    also: Settings = {}
    """Further settings that go with `to`."""
    same: str = ""
    """Reason why no setting is needed."""
    refused: str = ""
    """Reason of a refusal; `same` if empty."""
    note: str = ""
    """Reason of a translation."""

    @property
    def targets(self) -> list[str]:
        """The settings of `to` as a list."""
        return [self.to] if isinstance(self.to, str) else self.to


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """The argument of a rule's function."""

    key: str
    value: Any
    source: Source
    rule: Rule

    def sibling(
        self,
        name: str,
        default: Any,
    ) -> Any:
        """Return the value of another key of the same section."""
        section = self.key.rpartition(".")[0]
        return self.source.get(f"{section}.{name}" if section else name, default)


Function = Callable[[Given], Fate]


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rules of one system. implied: values of keys that the source may omit, where the default
    of this project differs. texts: anchors of the yaml file.
    """

    texts: list[str]
    conditions: dict[str, Condition]
    implied: dict[str, Any]
    rules: dict[str, Rule]

    def __post_init__(self) -> None:
        for key, rule in self.rules.items():
            if rule.if_ and rule.if_ not in self.conditions:
                raise ValueError(f"{key}: no condition is named {rule.if_}")


def read_table(system: str) -> Table:
    """Read `<system>.yaml` of this package. Raises msgspec.ValidationError if it is malformed."""
    text = resources.files(__package__).joinpath(f"{system}.yaml").read_bytes()
    return msgspec.yaml.decode(text, type=Table)


def warmup_share(given: Given) -> Fate:
    """Turn a share of all steps into a number of steps, if the source says how many there are."""
    path = given.rule.targets[0]
    value = given.value
    if not value or value < 0:
        return Fate("translated", settings={path: 0})
    # verl computes a share from its own number of steps, which may follow from the data.
    steps = given.source.get("trainer.total_training_steps")
    if not isinstance(steps, int) or steps <= 0:
        problem = "a share of a number of steps that the file does not name"
        return Fate("refused", f"{problem}; set {path}={value:g} x num_steps")
    return Fate(
        "translated",
        f"{value:g} x {steps}",
        {path: round(value * steps)},
    )


def epochs(given: Given) -> Fate:
    """Translate the number of epochs, unless the file names a number of steps."""
    for key in _STEPS:
        if isinstance(given.source.get(key), int):
            return Fate("defaulted", f"{key} is given")
    return Fate(
        "translated",
        settings={"num_steps": None, "data.epochs": given.value},
    )


def several_machines(given: Given) -> Fate:
    """Translate the number of machines: more than one form a Ray cluster of machines with GPUs."""
    # One machine needs no cluster.
    if given.value == 1:
        return Fate("defaulted", "one machine")
    gpus = given.sibling("n_gpus_per_node", 8)
    settings = {"launcher": "ray", "launcher.nodes": given.value, "launcher.gpus_per_node": gpus}
    return Fate(
        "translated",
        f"ray start on {given.value} machines",
        settings,
    )


def to_wandb(project: Any) -> Fate:
    """Send the metrics to Weights & Biases too, if it is installed."""
    # A setting that the launch then refuses would not help.
    if find_spec("wandb") is None:
        remedy = f"pip install 'async-rl[wandb]' and set monitoring.wandb={project}"
        return Fate("refused", f"wandb is not installed here; {remedy}")
    return Fate("translated", settings={"monitoring.wandb": str(project)})


SHARED: Mapping[str, Function] = {
    "warmup_share": warmup_share,
    "epochs": epochs,
    "several_machines": several_machines,
}
"""Functions of rules that both systems use."""


def flat(
    tree: Any,
    prefix: str = "",
) -> dict[str, Any]:
    """Return the leaves by dotted key. An empty mapping is a leaf, so that it is mentioned too."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        leaves.update(flat(value, f"{prefix}.{name}" if prefix else str(name)))
    return leaves


def migrate(
    source: Source,
    table: Table,
    functions: Mapping[str, Function],
) -> Migration:
    """Apply the table to every key of the source and to the implied keys that it omits."""
    # A key that the file omits has the default of its system, which may differ from ours.
    absent = {key: value for key, value in table.implied.items() if key not in source}
    complete = {**absent, **source}
    code = {**SHARED, **functions}
    lines = [
        Line(key, value, _fate(key, value, source, table, code)) for key, value in source.items()
    ]
    for key, value in absent.items():
        lines.append(Line(f"{key} (absent)", value, _fate(key, value, complete, table, code)))
    base = "ppo_code" if table.conditions["critic"].is_met(source) else "grpo_code"
    settings: Settings = {}
    for line in lines:
        settings.update(line.fate.settings)
    tree = as_written(base)
    for path, value in choices_first(settings.items()):
        put(tree, path, value)
    expand(tree)
    foreign = {path: drop_if_foreign(tree, path) for path in settings}
    lines = [msgspec.structs.replace(line, fate=_effective(line.fate, foreign)) for line in lines]
    kept = [(path, value) for path, value in settings.items() if foreign[path] is None]
    return Migration(base, dict(choices_first(kept)), lines)


def _effective(
    fate: Fate,
    foreign: Mapping[str, str | None],
) -> Fate:
    """The fate without parameters that the chosen variant does not have."""
    kept = {path: value for path, value in fate.settings.items() if foreign[path] is None}
    if kept or not fate.settings:
        return msgspec.structs.replace(fate, settings=kept)
    causes = ", ".join(sorted({str(foreign[path]) for path in fate.settings}))
    return Fate("defaulted", f"without effect: {causes}")


def _fate(
    key: str,
    value: Any,
    source: Source,
    table: Table,
    code: Mapping[str, Function],
) -> Fate:
    rule = _rule(key, table.rules)
    condition = table.conditions[rule.if_] if rule.if_ else None
    if condition is not None and not condition.is_met(source):
        return Fate("defaulted", condition.reason)
    # null means "the default" in both systems.
    if rule.if_null and value is None:
        return Fate("defaulted", rule.if_null)
    if rule.code:
        return code[rule.code](Given(key=key, value=value, source=source, rule=rule))
    if rule.only or rule.as_:
        return _compared(rule, value, source)
    # Lists and sections cannot be keys of a mapping.
    is_listed = isinstance(value, Hashable) and value in (rule.cases or rule.choices)
    if rule.cases and is_listed:
        return Fate(
            "translated",
            rule.note,
            rule.cases[value],
        )
    if rule.choices:
        if not is_listed:
            return Fate("refused", f"{value} has no counterpart; {rule.refused}")
        return Fate(
            "translated",
            rule.note,
            dict.fromkeys(rule.targets, rule.choices[value]),
        )
    if rule.to:
        converted = _CONVERTERS[rule.by](value) if rule.by else value
        return Fate(
            "translated", rule.note, {**dict.fromkeys(rule.targets, converted), **rule.also}
        )
    return (
        Fate("defaulted", rule.same)
        if rule.same
        else Fate(
            "refused",
            rule.refused,
        )
    )


def _compared(
    rule: Rule,
    value: Any,
    source: Source,
) -> Fate:
    if value in rule.only or (rule.as_ and value == source.get(rule.as_, value)):
        return Fate("defaulted", rule.same or f"as {rule.as_}: actor and critic share it")
    if rule.as_ and not rule.refused:
        return Fate("refused", f"differs from {rule.as_}; actor and critic share it here")
    return Fate("refused", rule.refused or rule.same)


def _rule(
    key: str,
    rules: Mapping[str, Rule],
) -> Rule:
    if key in rules:
        return rules[key]
    section = key
    # The longest section first, so that a rule for a part wins over one for the whole.
    while section:
        rule = rules.get(f"{section}.*")
        if rule is not None:
            return rule
        section = section.rpartition(".")[0]
    return Rule(refused="no rule for it: check whether this project has a setting for it")
