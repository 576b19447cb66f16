"""The problems of a composed configuration: pydantic's errors as one line each, with path=value,
what is wrong, the remedy and the description of the setting.
"""

import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from async_rl.composition.schema import (
    FUNCTION,
    KIND,
    entry_of,
    find,
    flatten,
    mappings,
    sections,
    settings,
    value_at,
    variants,
)
from async_rl.config.base import show
from async_rl.config.run import RunConfig
from async_rl.core.records import read_packaged

_LISTED = 20


def nearest(path: str, *, among: Iterable[str]) -> str | None:
    """The candidate most like `path`, by the whole path or its last part; None without a match."""
    leaf = path.rsplit(".", 1)[-1]

    def likeness(candidate: str) -> float:
        own_leaf = candidate.rsplit(".", 1)[-1]
        by_leaf = difflib.SequenceMatcher(None, leaf, own_leaf).ratio()
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


def unknown(path: str, value: str) -> str:
    """The problem of a key that does not exist."""
    inner = entry_of(path)
    # By meaning first: likeness of letters leads from learning_rate to learner.minibatches.
    best = known_names().get(path.rpartition(".")[2])
    if best is None or inner:
        best = nearest(path, among=inner or [*settings(), *sections()])
    remedy = "--dry-run shows all that exist"
    if best is not None:
        setting = find(best)
        meaning = "a section" if setting is None else setting.description
        remedy = f"did you mean {best} ({meaning})?"
    return f"{path}={value}: there is no such setting; {remedy}"


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
    choice, _, name = path.rpartition(".")
    if error["type"] == "extra_forbidden" and setting is not None:
        chosen = value_at(tree, choice)[KIND]
        by_kind = variants().get(choice) or variants()[f"{choice.rpartition('.')[0]}.*"]
        owners = [kind for kind, given in by_kind.items() if name in given]
        if chosen not in owners:  # else the choice itself is wrong, and reported
            text = (
                f"{path}={show(value)}: {choice}={chosen} has no {name}, which belongs to"
                f" {', '.join(owners)}; leave it out, or set {choice}={owners[0]}"
            )
            yield path, text
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
    else:
        given = value_at(tree, path)
        # The position in a list is the last part of the location.
        entry = f"entry {error['loc'][-1]} " if isinstance(error["loc"][-1], int) else ""
        message = error["msg"].replace("Field required", "is missing")
        must = entry + re.sub("^[A-Z][a-z]+ should", "must", message)
        if setting.choices:
            given = given.get(KIND) if isinstance(given, Mapping) else given
            # Some variants are impossible with the choice around this one, as pydantic says.
            if given not in setting.choices:
                own = ", or a function as in my.py:function" * (FUNCTION in setting.choices)
                must = f"must be one of {', '.join(setting.choices)}{own}"
        meaning = f" ({setting.description})" if setting.description else ""
        yield path, f"{path}={show(given)}: {must}{meaning}"


def _setting_path(location: tuple[int | str, ...]) -> str:
    """The path of a setting or section: without the index in a list that follows it, and without
    the names of variants, which pydantic adds after a choice.
    """
    path = ""
    for part in location:
        setting = find(path)
        if setting is not None and setting.choices:
            if part in (*setting.choices, KIND):
                continue
        elif setting is not None and path not in mappings():
            break
        path = f"{path}.{part}".lstrip(".")
    return path
