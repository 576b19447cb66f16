"""The bodies of HTTP requests by tables: their types and their fields are in TOML files."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

_PLAIN: Mapping[str, Any] = {
    "any": Any,
    "bool": bool,
    "float": float,
    "int": int,
    "list": list[Any],
    "object": dict[str, Any],
    "text": str,
}


def types_of(table: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the types of a table by their names, the plain ones, and more.

    A type has `fields`, or it is `of` one of several earlier types, or a list of them if it has
    `many`. The rest are limits of msgspec.
    """
    types = {**_PLAIN, **more}
    for name, spec in table.items():
        limits = dict(spec)
        if fields := limits.pop("fields", None):
            found = [field_of(field, text, types) for field, text in fields.items()]
            types[name] = msgspec.defstruct(name, found, kw_only=True)
            continue
        kind: Any = functools.reduce(operator.or_, [types[each] for each in limits.pop("of")])
        if limits.pop("many", False):
            kind = list[kind]
        types[name] = Annotated[kind, msgspec.Meta(**limits)]
    return types


def field_of(name: str, spec: str, types: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a field of a struct. spec: its type, with ! if it is required; then its default as
    JSON, null without one.
    """
    kind, _, default = spec.partition(" ")
    if kind.endswith("!"):
        return name, types[kind.rstrip("!")]
    if not default:
        return name, types[kind] | None, None
    return name, types[kind], msgspec.json.decode(default)
