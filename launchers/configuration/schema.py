"""The settings that exist, by path, read from the schema: what a wrong key was meant to be, and
what is wrong with a value.

Invariants: the schema in `async_rl/config/run.py` is the only source; every problem is one line
that names path, value and remedy. Used by `compose.py`.
"""

from __future__ import annotations

import difflib
import functools
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from async_rl.config.base import Section
from async_rl.config.run import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One leaf of the schema. type carries its range as msgspec metadata."""

    path: str
    type: Any
    description: str
    is_required: bool = True

    @property
    def plain_type(self) -> Any:
        """The type without its metadata."""
        return get_args(self.type)[0] if get_origin(self.type) is Annotated else self.type

    @property
    def choices(self) -> tuple[str, ...]:
        """What a Literal setting may be; empty for others."""
        return get_args(self.plain_type) if get_origin(self.plain_type) is Literal else ()

    @property
    def is_list_of_strings(self) -> bool:
        """Whether one string stands for a list of one."""
        return bool(self.plain_type == list[str])

    @property
    def takes_text(self) -> bool:
        """Whether the value is a string (or null)."""
        return str in _alternatives(self.type)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, metadata taken off; a type by itself is its only alternative."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(plain for member in get_args(annotation) for plain in _alternatives(member))
    return (annotation,)


@functools.cache
def settings() -> dict[str, Setting]:
    """Every setting by its dotted path, in the order of the schema."""
    return {setting.path: setting for setting in _walk(RunConfig, "")}


@functools.cache
def mappings() -> dict[str, type[Section]]:
    """Settings that hold sections by a name that people give: by path, what an entry is."""
    plain = {path: setting.plain_type for path, setting in settings().items()}
    return {
        path: get_args(kind)[1]
        for path, kind in plain.items()
        if get_origin(kind) is dict and issubclass(get_args(kind)[1], Section)
    }


def entry_of(path: str) -> dict[str, Setting]:
    """The settings of the entry of a mapping that this path is, or lies in; empty for other paths."""
    for place, section in mappings().items():
        if path.startswith(place + "."):
            name = path.removeprefix(place + ".").partition(".")[0]
            return {setting.path: setting for setting in _walk(section, f"{place}.{name}.")}
    return {}


def find(path: str) -> Setting | None:
    """The setting of this path, be it of the schema or of a mapping's entry."""
    return settings().get(path) or entry_of(path).get(path)


@functools.cache
def sections() -> frozenset[str]:
    """Dotted paths of all sections."""
    paths = (path.split(".") for path in settings())
    return frozenset(".".join(parts[:depth]) for parts in paths for depth in range(1, len(parts)))


def _walk(section: type[Section], prefix: str) -> Iterator[Setting]:
    for field in msgspec.structs.fields(section):
        path = prefix + field.encode_name
        if isinstance(field.type, type) and issubclass(field.type, Section):
            yield from _walk(field.type, path + ".")
        else:
            metas = getattr(field.type, "__metadata__", ())
            yield Setting(
                path=path,
                type=field.type,
                description=next((m.description for m in metas if m.description), ""),
                is_required=field.required,
            )


def nearest(path: str, *, among: Iterable[str]) -> str | None:
    """The candidate most like `path`, by the whole path or by its last part; None if none is like
    it.
    """
    leaf = path.rsplit(".", 1)[-1]

    def likeness(candidate: str) -> float:
        own_leaf = candidate.rsplit(".", 1)[-1]
        by_leaf = difflib.SequenceMatcher(None, leaf, own_leaf).ratio()
        if min(len(leaf), len(own_leaf)) >= 4 and (leaf in own_leaf or own_leaf in leaf):
            by_leaf = max(by_leaf, 0.85)
        by_path = difflib.SequenceMatcher(None, path, candidate).ratio()
        # The last part is what people remember; the path breaks ties between equal last parts.
        return max(by_path, 0.9 * by_leaf + 0.1 * by_path)

    best = max(among, key=likeness, default=None)
    return best if best is not None and likeness(best) >= 0.6 else None


def unknown(path: str, value: str) -> str:
    """The problem of a key that does not exist."""
    inner = entry_of(path)
    best = nearest(path, among=inner or [*settings(), *sections()])
    if best is None:
        known = (
            f"there are {', '.join(leaf.rpartition('.')[2] for leaf in inner)}"
            if inner
            else "--dry-run shows all that exist"
        )
        return f"{path}={value}: there is no such setting; {known}"
    if best in sections():
        inside = [p for p in settings() if p.startswith(best + ".")]
        return (
            f"{path}={value}: there is no such setting; the nearest is the section {best} with"
            f" {', '.join(inside[:6])}"
        )
    return (
        f"{path}={value}: there is no such setting; did you mean {best}"
        f" ({(inner or settings())[best].description})?"
    )


def wrong_value(setting: Setting, value: Any) -> str | None:
    """What is wrong with the type or the range of a value; None if nothing is."""
    try:
        msgspec.convert(value, setting.type)
    except msgspec.ValidationError as error:
        what = str(error).replace("`", "").partition(" - at ")[0]
    else:
        return None
    shown = f"{setting.path}={show(value)}"
    if setting.choices:
        best = nearest(str(value), among=setting.choices)
        hint = f"; did you mean {best}?" if best else ""
        return f"{shown}: must be one of {', '.join(setting.choices)}{hint} ({setting.description})"
    if setting.takes_text and isinstance(value, bool | int | float):
        return (
            f"{shown}: must be text; put it in quotes: '{setting.path}=\"{show(value)}\"'"
            f" ({setting.description})"
        )
    return f"{shown}: {_in_words(what)} ({setting.description})"


_WORDS = (
    (r"^Expected ", "must be "),
    (r" \| null", " or null"),
    (r"\bfloat\b", "a number"),
    (r"\bint\b", "a whole number"),
    (r"\bbool\b", "true or false"),
    (r"\bstr\b", "text"),
    (r"\barray\b", "a list"),
    (r"\bobject\b", "a section"),
    (r", got ", ", not "),
)


def _in_words(message: str) -> str:
    """The validator's message without names of Python types."""
    for pattern, words in _WORDS:
        message = re.sub(pattern, words, message)
    return message


def show(value: Any) -> str:
    """A value as a person would write it in an override."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{show(inner)}" for key, inner in value.items()) + "}"
    return "[" + ",".join(map(show, value)) + "]" if isinstance(value, list) else str(value)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of a nested mapping by dotted path; a mapping where the schema has a setting is a
    leaf.
    """
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and path not in settings() and (value or path in sections()):
            yield from flatten(value, path + ".")
        else:
            yield path, value


def problems(tree: Mapping[str, Any]) -> list[str]:
    """All that is wrong with keys, types and ranges of a composed configuration; empty if it fits
    the schema.
    """
    found = []
    leaves = dict(flatten(tree))
    for path, value in leaves.items():
        if path in sections():
            found.append(
                f"{path}={show(value)}: {path} is a section; set one of its settings,"
                f" {path}.<name>=<value>"
            )
        elif path not in settings():
            found.append(unknown(path, show(value)))
        elif path in mappings() and isinstance(value, Mapping):
            found += [
                problem
                for name, entry in value.items()
                for problem in _entry_problems(f"{path}.{name}", entry)
            ]
        elif problem := wrong_value(settings()[path], value):
            found.append(problem)
    for path, setting in settings().items():
        if path not in leaves and not any(path.startswith(leaf + ".") for leaf in leaves):
            found.append(f"{path} is missing: {setting.description}; set {path}=<value>")
    return found


def _entry_problems(path: str, entry: Any) -> Iterator[str]:
    """What is wrong with one entry of a mapping."""
    inner = entry_of(f"{path}.")
    if not isinstance(entry, Mapping):
        yield f"{path}={show(entry)}: is a section; set one of its settings, {path}.<name>=<value>"
        return
    for key, value in entry.items():
        if (setting := inner.get(f"{path}.{key}")) is None:
            yield unknown(f"{path}.{key}", show(value))
        elif problem := wrong_value(setting, value):
            yield problem
    for leaf, setting in inner.items():
        if setting.is_required and leaf.rpartition(".")[2] not in entry:
            yield f"{leaf} is missing: {setting.description}; set {leaf}=<value>"
