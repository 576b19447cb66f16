"""Plain values as bytes between a program and its judge: JSON, with a tagged object for each type
that JSON lacks.

Tags: t tuple, s set, f frozenset, d dict (list of pairs), i big integer (hex), b bytes (hex), c
complex, u instance of a subclass of a plain type or numpy scalar ([type name, its plain value]), r
iterator, view or array ([type name, items]), o any other value (type name). Invariants: `encode`
runs inside the jail and is not trusted. `decode` runs outside, accepts hostile bytes, raises
ValueError for malformed ones, and returns exact builtin types (or `Foreign`), whose comparison runs
no code of the program.
"""

from __future__ import annotations

import json
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final

MAX_DEPTH: Final = 60
"""Both sides refuse deeper nesting, so that the host's recursion stays far below its limit."""
MAX_ITEMS: Final = 100_000
"""Items taken from an iterator."""
# Comparing this many pairwise takes microseconds; honest items rarely share a hash.
_MAX_EQUAL_HASHES = 64

_SCALARS = frozenset({int, float, bool, str, type(None)})
# JSON takes quadratic time for decimal digits, and Python refuses 4,300 of them.
_INT_BOUND = 1 << 1000
_to_chunks = json.encoder.c_make_encoder(  # type: ignore[attr-defined]
    None, None, json.encoder.encode_basestring_ascii, None, ":", ",", False, False, True
)
_from_json = json.JSONDecoder().decode
_VIEWS: tuple[type, ...] = (
    range,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
    deque,
    map,
    filter,
    zip,
    enumerate,
    reversed,
    type(_ for _ in ""),
)


class Foreign:
    """A value that is not of an exact plain type. It equals nothing, not even itself.

    kind: "subclass", "iterator" or "opaque"; value: the plain value in it, None for opaque.
    """

    __slots__ = ("kind", "type_name", "value")

    def __init__(self, kind: str, type_name: str, value: Any) -> None:
        self.kind, self.type_name, self.value = kind, type_name, value

    def __eq__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return id(self)

    def __iter__(self) -> Iterator[Any]:
        if self.kind != "iterator":
            raise TypeError(f"{self.type_name!r} object is not iterable")
        return iter(self.value)

    def __repr__(self) -> str:
        return f"<{self.type_name}>"


def encode(value: Any) -> bytes:
    """The value as bytes.

    Raises MemoryError, RecursionError or ValueError for a value that cannot be encoded.
    """
    kind = type(value)
    if kind in _SCALARS or (kind is list and _SCALARS.issuperset(map(type, value))):
        try:
            return "".join(_to_chunks(value, 0)).encode()
        except ValueError:  # an integer of more digits than Python converts to decimal
            pass
    return "".join(_to_chunks(_tagged(value, 0), 0)).encode()


def _tagged(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind is int:
        return value if -_INT_BOUND < value < _INT_BOUND else {"i": hex(value)}
    if kind in _SCALARS:
        return value
    if depth > MAX_DEPTH:
        return {"o": "value nested too deep"}
    depth += 1
    if kind is list or kind in _TAGS:
        items = [_tagged(item, depth) for item in value]
        return items if kind is list else {_TAGS[kind]: items}
    if kind is dict:
        return {"d": [[_tagged(key, depth), _tagged(item, depth)] for key, item in value.items()]}
    if kind is bytes:
        return {"b": value.hex()}
    if kind is complex:
        return {"c": [value.real, value.imag]}
    return _foreign(value, kind, depth)


def _foreign(value: Any, kind: type, depth: int) -> Any:
    name = kind.__name__[:80]
    if kind is Foreign and value.kind == "iterator":
        return _tagged(value.value, depth - 1)
    if kind in _VIEWS:
        items = list(islice(value, MAX_ITEMS + 1))
        # An endless iterator must not use up the memory.
        if len(items) > MAX_ITEMS:
            return {"o": name}
        return {"r": [name, _tagged(items, depth - 1)]}
    for base, plain in _PLAIN.items():
        if issubclass(kind, base):
            return {"u": [name, _tagged(plain(value), depth)]}
    # Not imported here: a program without numpy would pay for it.
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.generic):
        return {"u": [name, _tagged(value.item(), depth)]}
    if numpy is not None and issubclass(kind, numpy.ndarray) and value.ndim:
        return {"r": [name, _tagged(value.tolist(), depth)]}
    return {"o": name}


def _of(base: type[Any]) -> Callable[[Any], Any]:
    # The base's own iterator: the subclass may have another one.
    return lambda value: base(base.__iter__(value))


_TAGS: dict[type, str] = {tuple: "t", set: "s", frozenset: "f"}
_PLAIN: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    bytes: bytes.__bytes__,
    bytearray: bytes,
    dict: lambda value: dict(dict.items(value)),
    **{base: _of(base) for base in (list, tuple, set, frozenset)},
}
"""Base type -> the plain value in an instance of a subclass."""


def decode(data: bytes) -> Any:
    """The plain value in hostile bytes. Raises ValueError for anything malformed."""
    try:
        tree = _from_json(data.decode("ascii"))
        return tree if b"{" not in data and b"[[" not in data else _untagged(tree, 0)
    except (RecursionError, TypeError, OverflowError, UnicodeDecodeError) as error:
        raise ValueError(f"malformed value: {error}") from error


def _untagged(tree: Any, depth: int) -> Any:
    if depth > 2 * MAX_DEPTH + 4:
        raise ValueError("nested too deep")
    if type(tree) is list:
        return [_untagged(item, depth + 1) for item in tree]
    if type(tree) is not dict:
        return tree
    if len(tree) != 1:
        raise ValueError("a tagged object has one key")
    ((tag, body),) = tree.items()
    reader = _READERS.get(tag)
    if reader is None:
        raise ValueError(f"unknown tag {tag!r:.20}")
    return reader(body, depth + 1)


def _items(body: Any, depth: int) -> list[Any]:
    return [_untagged(item, depth) for item in body]


def hashable(items: list[Any]) -> list[Any]:
    """The items, unless many different ones have the same hash: a set of them could take hours.

    Hashes that differ cost a bounded number of steps each, however they were chosen.
    """
    hashes = sorted(map(hash, items))
    if any(map(operator.eq, hashes, hashes[_MAX_EQUAL_HASHES:])):
        groups: dict[int, list[Any]] = {}
        for item in items:
            group = groups.setdefault(hash(item), [])
            if item not in group:
                group.append(item)
            if len(group) > _MAX_EQUAL_HASHES:
                raise ValueError("too many equal hashes")
    return items


def unwrapped(value: Any) -> Any:
    """The value with instances of subclasses of plain types replaced by plain values, at any depth.

    Other foreign values stay. Raises ValueError if plain values have too many equal hashes.
    """
    kind = type(value)
    if kind is Foreign:
        inner = unwrapped(value.value)
        return inner if value.kind == "subclass" else Foreign(value.kind, value.type_name, inner)
    if kind is list or kind is tuple:
        return kind(map(unwrapped, value))
    if kind is set or kind is frozenset:
        return kind(hashable(list(map(unwrapped, value))))
    if kind is dict:
        keys = hashable(list(map(unwrapped, value)))
        return dict(zip(keys, map(unwrapped, value.values()), strict=True))
    return value


def _read_dict(body: Any, depth: int) -> dict[Any, Any]:
    pairs = _items(body, depth)
    hashable([key for key, _ in pairs])
    return dict(pairs)


def _read_complex(body: Any, depth: int) -> complex:
    real, imaginary = body
    return complex(real, imaginary)


def _read_named(kind: str) -> Callable[[Any, int], Foreign]:
    def read(body: Any, depth: int) -> Foreign:
        name, value = body
        if type(name) is not str:
            raise ValueError("the name of a type is a text")
        return Foreign(kind, name, _untagged(value, depth))

    return read


# A body of the wrong type raises TypeError, which `decode` reports as malformed.
_READERS: dict[str, Callable[[Any, int], Any]] = {
    "t": lambda body, depth: tuple(_items(body, depth)),
    "s": lambda body, depth: set(hashable(_items(body, depth))),
    "f": lambda body, depth: frozenset(hashable(_items(body, depth))),
    "d": _read_dict,
    "i": lambda body, depth: int(body, 16),
    "b": lambda body, depth: bytes.fromhex(body),
    "c": _read_complex,
    "u": _read_named("subclass"),
    "r": _read_named("iterator"),
    "o": lambda body, depth: Foreign("opaque", str(body)[:80], None),
}
