"""The page docs/configuration.md: every setting with unit, range, value in conf/ and meaning,
generated from the schema and the files of conf/.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from async_rl.composition.files import compose_files, names, source_of
from async_rl.composition.schema import (
    CONF_DIR,
    Setting,
    Spec,
    Tree,
    entry_of,
    expand,
    flatten,
    json_schema,
    kinds_of,
    mappings,
    members_of,
    settings,
    variants,
)
from async_rl.config.base import show
from async_rl.core.machine import this_machine

_TYPES = {
    "integer": "whole number",
    "number": "number",
    "boolean": "true, false",
    "string": "text",
    "null": "null",
    "object": "mapping",
}
_BOUNDS = {
    "minimum": ">=",
    "exclusiveMinimum": ">",
    "maximum": "<=",
    "exclusiveMaximum": "<",
}
_HEAD = """# Configuration

`make docs` generates this page from the schema (`async_rl/config/`) and from `conf/`; edit those. A
run is composed of `conf/base.yaml`, one file of each group below, and `key=value` on the command
line, which has precedence. `async-rl launch conf=ppo_code --dry-run` shows the result. An unknown
key, a value outside its range and a contradiction are errors that name the remedy.

The column *value; range* has the value of most configurations in `conf/` and names those with
another. A value in `${...}` is computed from the machine and from other settings. `int` is a whole
number, `float` any number. Names end with their unit: `_s` is seconds, `_mb` and `_kb` are
megabytes and kilobytes.

A choice is one setting, whose value names a variant: `algorithm.policy_loss=gspo` takes the values
of that variant (`conf/variants.yaml`), and `algorithm.policy_loss.clip_low=0.1` sets a parameter of
the chosen one. The column has the values of a parameter by variant; with other variants it is an
error. NAME in a path is a name that you choose. A plug-in is a function of your own
([python.md](python.md#plug-ins)).

## The fifteen settings that matter
"""
_THAT_MATTER = {
    "model.path": "the model to train; null = the embedded tiny model",
    "data.train_files": "your prompts; data.md describes the columns",
    "data.val_files": "held-out prompts; without them nothing measures progress",
    "data.max_response_tokens": "raise it if `length/truncated_share` is high",
    "num_steps": "null with `data.epochs` set computes it from the number of rows",
    "reward.terms": "`reward.terms.mine=file.py:score` is your function; {} = the row's tests",
    "algorithm.advantage": "`algorithm=grpo`, `algorithm=ppo`, ... set it and related settings",
    "algorithm.kl": "`loss` or `reward` keeps the policy close to its start; needs one more model",
    "learner.optimizer.lr": "lower it if `policy/entropy` falls to 0 or the reward collapses",
    "buffer.groups_per_step": "prompts per step; more make steps slower and less noisy",
    "generation.group_size": "raise it if most groups have equal rewards",
    "buffer.max_staleness_versions": "0 is synchronous; a high bound needs a lower learning rate",
    "learner.budget_tokens": "as many as fit into memory; the gradient stays the same",
    "generators.count": "raise it if the learner waits; `async-rl status` shows who waits",
    "learner.ranks": "raise it if the generators wait, or if memory is short",
}
"""Advice on the settings that most runs change."""
_EXPLAINED = {"algorithm": " [algorithms.md](algorithms.md) has the formulas."}
"""The page that explains a section."""
# Words of ranges in error messages, and their short forms in the tables.
_SHORT = {
    "whole number": "int",
    "number": "float",
    "text (not empty)": "text",
    "true, false": "bool",
}


def _as_written(conf: str) -> Tree:
    """The composition of `conf` for a machine without GPUs, with `${...}` left as written."""
    tree, _ = compose_files(source_of(conf), ["hardware=cpu"], this_machine(), is_cluster=False)
    expand(tree)
    return tree


def settings_page() -> str:
    """The whole page."""
    written = {conf: dict(flatten(_as_written(conf))) for conf in names()}
    parts = [_HEAD]
    advised = [
        (str(number), f"`{path}`", advice)
        for number, (path, advice) in enumerate(_THAT_MATTER.items(), start=1)
    ]
    parts.append(table(("", "setting", "advice"), advised))
    by_section: dict[str, list[tuple[Setting, str]]] = {}
    for setting in settings().values():
        rows = by_section.setdefault(_section_of(setting.path), [])
        rows.append((setting, _values(setting, written)))
        if setting.path in mappings():
            inner = entry_of(f"{setting.path}.NAME").values()
            rows += [(s, _values_of_entry(setting.path, s)) for s in inner]
    for section, rows in by_section.items():
        parts.append(f"\n## {section or 'The run'}\n\n{_meaning_of(section)}\n")
        parts.append(_rows(rows))
    parts.append(
        "\n## Algorithms\n\n"
        "`algorithm=NAME` selects the file `NAME.yaml` of `conf/algorithm/`. The groups `hardware`"
        " ([presets](hardware.md#presets)), `model` and `task` are selected in the same way.\n"
    )
    files = [
        (f"`algorithm={path.stem}`", ", ".join(_settings_in(path.stem, "algorithm")))
        for path in sorted((CONF_DIR / "algorithm").glob("*.yaml"))
    ]
    parts.append(table(("file", "sets"), files))
    return "\n".join(parts) + "\n"


def _section_of(path: str) -> str:
    """The section whose table has this setting: the innermost one that is not a choice."""
    section = path.rpartition(".")[0]
    while any(kinds_of(spec) for spec in section_specs()[section]):
        section = section.rpartition(".")[0]
    return section


def _rows(listed: Sequence[tuple[Setting, str]]) -> str:
    """The table of settings with the text of their values."""
    rows = [
        (f"`{s.path}`", "; ".join(filter(None, (values, short_span(s)))), s.description)
        for s, values in listed
    ]
    return table(("setting", "value; range", "meaning"), rows)


def span(spec: Spec) -> str:
    """The allowed values of a JSON schema, in words: `whole number >= 1 or null`."""
    if "anyOf" in spec:
        return " or ".join(span(member) for member in spec["anyOf"])
    if "enum" in spec:
        return ", ".join(spec["enum"])
    if "prefixItems" in spec:
        return "list of " + " and ".join(span(member) for member in spec["prefixItems"])
    if "items" in spec:
        return f"list of {span(spec['items'])}"
    words = [_TYPES[spec["type"]]]
    bounds = [f"{sign} {spec[bound]:g}" for bound, sign in _BOUNDS.items() if bound in spec]
    if bounds:
        words.append(" and ".join(bounds))
    if "pattern" in spec:
        words.append(f"like `{spec['pattern']}`")
    if "minLength" in spec:
        words.append("(not empty)")
    return " ".join(words)


def short_span(setting: Setting) -> str:
    """The allowed values in the words of the tables: `int >= 1 or null`."""
    spec = setting.spec
    if named := setting.choices or spec.get("enum"):
        return f"`{'`, `'.join(named)}`"
    text = span(spec)
    for words, short in _SHORT.items():
        text = text.replace(words, short)
    return text


def _values_of_entry(mapping: str, setting: Setting) -> str:
    """The values of a setting of an entry, whose variants may have some; else whether it must be
    given.
    """
    general = dataclasses.replace(
        setting, path=setting.path.replace(f"{mapping}.NAME", f"{mapping}.*")
    )
    return _values(general, {}) or ("" if "default" in setting.spec else "required")


def _values(setting: Setting, written: dict[str, dict[str, Any]]) -> str:
    """The usual value in conf/ and the configurations with another; or the values of variants, with
    their names unless all have the same.
    """
    of_variants = values_of_variants().get(setting.path)
    by_owner = of_variants or {conf: leaves[setting.path] for conf, leaves in written.items()}
    owners: dict[str, list[str]] = {}
    for owner, value in by_owner.items():
        owners.setdefault(f"`{show(value)}`", []).append(owner)
    usual = max(owners, key=lambda value: len(owners[value]), default="")
    if not of_variants and 2 * len(owners.get(usual, ())) > len(by_owner):
        owners.pop(usual)
        named = [usual]
    else:
        named = []
    if of_variants and len(owners) == 1:
        missing = variants()[setting.path.rpartition(".")[0]].keys() - by_owner.keys()
        if not missing:
            return usual
        if len(missing) == 1 < len(by_owner):
            return f"{usual}, not with `{missing.pop()}`"
    others = [
        f"{', '.join(f'`{owner}`' for owner in having)}: {value}"
        for value, having in owners.items()
    ]
    return "; ".join(named + others)


@functools.cache
def values_of_variants() -> dict[str, dict[str, Any]]:
    """The values of each parameter in conf/variants.yaml, by path and variant."""
    by_path: dict[str, dict[str, Any]] = {}
    for choice, by_kind in variants().items():
        for kind, parameters in by_kind.items():
            for path, value in flatten(parameters, f"{choice}."):
                by_path.setdefault(path, {})[kind] = value
    return by_path


def _settings_in(name: str, group: str) -> list[str]:
    file = CONF_DIR / group / f"{name}.yaml"
    tree = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    assert isinstance(tree, dict)
    match = re.match(r"# @package (\w+)", file.read_text())
    package = match[1] if match else group
    prefix = "" if package == "_global_" else f"{package}."
    base = [
        f"all of `{entry}`"
        for entry in tree.pop("defaults", [])
        if isinstance(entry, str) and entry != "_self_"
    ]
    return base + [
        f"`{path}={show(value)}`"
        for path, value in flatten({str(key): value for key, value in tree.items()}, prefix)
    ]


@functools.cache
def section_specs() -> dict[str, tuple[Spec, ...]]:
    """The JSON schemas of every section by its dotted path, one for each variant of a choice; the
    run itself has the empty path.
    """
    specs: dict[str, tuple[Spec, ...]] = {}

    def walk(path: str, spec: Spec) -> None:
        specs[path] = (*specs.get(path, ()), spec)
        for name, field in spec["properties"].items():
            for member in members_of(field):
                walk(f"{path}.{name}".lstrip("."), member)

    walk("", json_schema())
    return specs


def _meaning_of(section: str) -> str:
    (spec,) = section_specs()[section]
    return _first_sentence(spec) + _EXPLAINED.get(section, "")


def _first_sentence(section: Spec) -> str:
    paragraph = str(section.get("description", "")).partition("\n\n")[0]
    first, end, _ = " ".join(paragraph.split()).partition(". ")
    return first + end.strip()


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )
