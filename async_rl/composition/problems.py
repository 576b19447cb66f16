"""The problems of a composed configuration: pydantic's errors as one line each, with path=value,
what is wrong, the remedy and the description of the setting.
"""

import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from async_rl.composition.choices import FUNCTION
from async_rl.composition.schema import (
    KIND,
    Setting,
    entry_of,
    find,
    flatten,
    mappings,
    sections,
    settings,
)
from async_rl.config.base import show
from async_rl.config.run import RunConfig
from async_rl.core.packaged import read_packaged

_LISTED = 20


def nearest(path: str, *, among: Iterable[str]) -> str | None:
    """The candidate most like `path`, by the whole path or its last part; None without a match."""
    leaf = path.rsplit(".", 1)[-1]

    def likeness(candidate: str) -> float:
        own_leaf = candidate.rsplit(".", 1)[-1]
        by_leaf = difflib.SequenceMatcher(None, leaf, own_leaf).ratio()
        # A short name is part of many names, so 4 letters are the least.
        if min(len(leaf), len(own_leaf)) >= 4 and (leaf in own_leaf or own_leaf in leaf):
            by_leaf = max(by_leaf, 0.85)
        by_path = difflib.SequenceMatcher(None, path, candidate).ratio()
        # People remember the last part; the path breaks ties between equal last parts.
        return max(by_path, 0.9 * by_leaf + 0.1 * by_path)

    best = max(among, key=likeness, default=None)
    return best if best is not None and likeness(best) >= 0.6 else None


def hint(word: str, *, among: Sequence[str]) -> str:
    """The remedy for a name that does not exist: the candidate most like it, or the first ones."""
    best = nearest(word, among=among)
    # A typing error has a neighbour; any other word gets the list.
    if best:
        return f"did you mean {best}?"
    return f"there are {', '.join(among[:_LISTED]) or 'none'}"


@functools.cache
def known_names() -> dict[str, str]:
    """The setting here by its name in other trainers."""
    return read_packaged(__package__, "known_names.yaml", dict[str, str])


def value_at(tree: Any, path: str) -> Any:
    """The value of a setting or section; None where it is missing."""
    for name in path.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def unknown(path: str, value: str) -> str:
    """The problem of a key that does not exist."""
    inner = entry_of(path)
    # By meaning first: likeness of letters leads from learning_rate to learner.minibatches.
    best = known_names().get(path.rpartition(".")[2])
    if best is None or inner:
        best = nearest(path, among=inner or [*settings(), *sections()])
    start = f"{path}={value}: there is no such setting"
    if best is None and inner:
        return f"{start}; there are {', '.join(leaf.rpartition('.')[2] for leaf in inner)}"
    if best is None:
        return f"{start}; --dry-run shows all that exist"
    setting = find(best)
    if setting is None:
        inside = [p for p in settings() if p.startswith(best + ".")]
        return f"{start}; the nearest is the section {best} with {', '.join(inside[:6])}"
    return f"{start}; did you mean {best} ({setting.description})?"


def of_another_variant(setting: Setting, value: Any, chosen: str) -> str:
    """The problem of a parameter that the chosen variant does not have."""
    choice, _, name = setting.path.rpartition(".")
    owners = ", ".join(setting.variants)
    return (
        f"{setting.path}={show(value)}: {choice}={chosen} has no {name}, which belongs to {owners};"
        f" leave it out, or set {choice}={setting.variants[0]}"
    )


def problems_of(tree: Mapping[str, Any]) -> dict[str, str]:
    """All wrong keys, types and ranges of a composed configuration, by path; empty if it fits."""
    try:
        RunConfig.model_validate(tree)
    except ValidationError as error:
        by_path: dict[str, str] = {}
        for one in error.errors():
            for path, text in _lines_of(dict(one), tree):
                by_path.setdefault(path, text)
        return by_path
    return {}


def _lines_of(error: Mapping[str, Any], tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    path = _setting_path(error["loc"])
    value = error["input"]
    setting = find(path)
    choice = path.rpartition(".")[0]
    if error["type"] == "extra_forbidden" and setting is not None:
        chosen = value_at(tree, choice)[KIND]
        if chosen not in setting.variants:  # else the choice itself is wrong, and reported
            yield path, of_another_variant(setting, value, chosen)
    elif error["type"] == "extra_forbidden":
        # A section of an unknown name may have many values; each is reported in its own line.
        is_section = isinstance(value, Mapping) and bool(value)
        leaves = flatten(value, f"{path}.") if is_section else [(path, value)]
        yield from ((leaf, unknown(leaf, show(inner))) for leaf, inner in leaves)
    elif setting is None:
        remedy = f"set one of its settings, {path}.<name>=<value>"
        yield path, f"{path}={show(value_at(tree, path))}: {path} is a section; {remedy}"
    elif error["type"] == "missing" and value_at(tree, path) is None:
        yield path, f"{path} is missing: {setting.description}; set {path}=<value>"
    elif setting.is_choice:
        allowed = error.get("ctx", {}).get("expected", "").replace("'", "")
        yield path, _wrong_choice(setting, value_at(tree, path), allowed)
    else:
        # The position in a list is the last part of the location.
        entry = f"entry {error['loc'][-1]} " if isinstance(error["loc"][-1], int) else ""
        message = error["msg"].replace("Field required", "is missing")
        must = entry + re.sub("^[A-Z][a-z]+ should", "must", message)
        yield path, wrong_value(setting, value_at(tree, path), must)


def _wrong_choice(setting: Setting, value: Any, allowed: str) -> str:
    """allowed: the variants, if only some are possible with the choice around this one."""
    if isinstance(value, Mapping) and KIND not in value:
        given = ", ".join(value)
        remedy = f"set {setting.path}=<one of {', '.join(setting.choices)}>"
        return f"{setting.path}: {given} is given without a variant; {remedy}"
    kind = value[KIND] if isinstance(value, Mapping) else value
    if kind in setting.choices:
        outer = setting.path.rpartition(".")[0]
        return f"{setting.path}={kind}: must be {allowed} with the chosen {outer}"
    return wrong_value(setting, kind, "")


def _setting_path(location: tuple[int | str, ...]) -> str:
    """The path of a setting or section: without the index in a list that follows it, and without
    the names of variants, which pydantic adds after a choice.
    """
    path = ""
    for part in location:
        setting = find(path)
        if setting is not None and setting.is_choice:
            if part in (*setting.choices, KIND):
                continue
        elif setting is not None and path not in mappings():
            break
        path = f"{path}.{part}".lstrip(".")
    return path


def wrong_value(setting: Setting, value: Any, must: str) -> str:
    """The problem of a value that does not fit its setting, in pydantic's words."""
    shown = f"{setting.path}={show(value)}"
    meaning = f" ({setting.description})" if setting.description else ""
    if setting.choices:
        best = nearest(str(value), among=setting.choices)
        hint = f"; did you mean {best}?" if best else ""
        own = ", or a function as in my.py:function" if FUNCTION in setting.choices else ""
        return f"{shown}: must be one of {', '.join(setting.choices)}{own}{hint}{meaning}"
    if setting.takes_text and isinstance(value, bool | int | float):
        quoted = f"'{setting.path}=\"{show(value)}\"'"
        return f"{shown}: must be text; put it in quotes: {quoted}{meaning}"
    return f"{shown}: {must}{meaning}"
