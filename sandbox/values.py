"""Plain values as bytes between a program and its judge: JSON, with a tagged object for each type
that JSON lacks.

Tags: t tuple, s set, f frozenset, d dict (list of pairs), i big integer (hex), l value of another
plain type or of a type of the library ([type name, its parts]), u instance of a subclass of a plain
type or numpy scalar ([type name, its plain value]), o any other value (what `encode` was given for
it; its type name). Invariants: `encode` runs inside the jail and is not trusted. `decode`
runs outside, accepts hostile bytes, raises ValueError for malformed ones, and returns values of
plain types, of types of the library, and what `other` makes of the rest; comparing them runs no
code of the program.
"""

import datetime
import json
import operator
import sys
from collections import Counter, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

MAX_DEPTH: Final = 60
"""Both sides refuse deeper nesting, so that the host's recursion stays far below its limit."""
# Comparing this many pairwise takes microseconds; honest items rarely share a hash.
_MAX_EQUAL_HASHES = 64

_SCALARS = frozenset({int, float, bool, str, type(None)})
# JSON takes quadratic time for decimal digits, and Python refuses 4,300 of them.
_INT_BOUND = 1 << 1000
_to_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_from_json = json.JSONDecoder().decode
_SPAN = operator.attrgetter("days", "seconds", "microseconds")
_LIBRARY: dict[type, tuple[Callable[[Any], list[Any]], Callable[..., Any]]] = {
    Decimal: (lambda value: [str(value)], Decimal),
    # Two integers: the text 1e999999999 would take all memory.
    Fraction: (
        lambda value: [value.numerator, value.denominator],
        lambda numerator, denominator: Fraction(numerator, denominator),
    ),
    range: (lambda value: [value.start, value.stop, value.step], range),
    deque: (lambda value: [list(value)], deque),
    bytes: (lambda value: [value.hex()], bytes.fromhex),
    complex: (lambda value: [value.real, value.imag], complex),
    datetime.timedelta: (lambda value: [*_SPAN(value)], datetime.timedelta),
    **{
        kind: (lambda value: [value.isoformat()], kind.fromisoformat)
        for kind in (datetime.date, datetime.time, datetime.datetime)
    },
}
"""Type -> its parts, and the value of the parts."""
_MAKERS = {kind.__name__: make for kind, (_, make) in _LIBRARY.items()}


class Foreign:
    """A value that is not of an exact plain type. It equals nothing else."""

    __slots__ = ("type_name",)

    def __init__(self, type_name: str) -> None:
        self.type_name = type_name

    def __repr__(self) -> str:
        return f"<{self.type_name}>"


Other = Callable[[str, Any], Any]
"""(tag u or o, its body) -> the value."""


def tagged(value: Any, depth: int, other: Callable[[Any, int], Any]) -> Any:
    """The value as a tree that JSON can express."""
    kind = type(value)
    if kind is int:
        return value if -_INT_BOUND < value < _INT_BOUND else {"i": hex(value)}
    if kind in _SCALARS:
        return value
    if depth > MAX_DEPTH:
        return {"o": "value nested too deep"}
    depth += 1
    if kind is list or kind in _TAGS:
        items = [tagged(item, depth, other) for item in value]
        return items if kind is list else {_TAGS[kind]: items}
    if kind is dict:
        return {"d": [[tagged(part, depth, other) for part in pair] for pair in value.items()]}
    if kind in _LIBRARY:
        return {"l": [kind.__name__, tagged(_LIBRARY[kind][0](value), depth, other)]}
    # Not imported here: a program without numpy would pay for it.
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.generic):
        return {"u": [kind.__name__, tagged(value.item(), depth, other)]}
    return other(value, depth)


def named(value: Any, depth: int) -> Any:
    """The tagged object of a value as its type's name, and the plain value in it if it has one."""
    name = type(value).__name__[:80]
    for copy in plain_in(value):
        return {"u": [name, tagged(copy, depth, named)]}
    return {"o": name}


def encode(value: Any, other: Callable[[Any, int], Any] = named) -> bytes:
    """The value as bytes. other: (value that is not plain, its depth) -> its tagged object.

    Raises MemoryError, RecursionError or ValueError for a value that cannot be encoded.
    """
    return _to_json(tagged(value, 0, other)).encode()


def plain_in(value: Any) -> list[Any]:
    """The plain value in an instance of a subclass of a plain type; empty for another value."""
    kind = type(value)
    return [plain_of(value) for base, plain_of in _PLAIN.items() if issubclass(kind, base)]


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


def foreign(tag: str, body: Any) -> Any:
    """A value of tag u or o as one that equals nothing."""
    return Foreign(body[0] if tag == "u" else str(body)[:80])


def plain(tag: str, body: Any) -> Any:
    """As `foreign`, but the plain value in an instance of a subclass."""
    return body[1] if tag == "u" else foreign(tag, body)


def decode(data: bytes, other: Other = foreign) -> Any:
    """The value in hostile bytes. other: makes the value of a tag u or o. Raises ValueError for
    anything malformed.
    """
    try:
        tree = _from_json(data.decode("ascii"))
        if b"{" not in data and b"[[" not in data:
            return tree
        return _untagged(tree, 0, other)
    except (ArithmeticError, LookupError, RecursionError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"malformed value: {error}") from error


def _untagged(tree: Any, depth: int, other: Other) -> Any:
    # A dictionary nests three lists and objects per level.
    if depth > 3 * MAX_DEPTH + 4:
        raise ValueError("nested too deep")
    if type(tree) is list:
        return [_untagged(item, depth + 1, other) for item in tree]
    if type(tree) is not dict:
        return tree
    if len(tree) != 1:
        raise ValueError("a tagged object has one key")
    ((tag, body),) = tree.items()
    body = _untagged(body, depth + 1, other)
    if tag in _READERS:
        return _READERS[tag](body)
    if tag == "o" or (tag == "u" and type(body) is list and list(map(type, body))[:1] == [str]):
        return other(tag, body)
    raise ValueError(f"malformed value of tag {tag!r:.20}")


def _hashable(items: Any) -> list[Any]:
    """The items of a list, unless many have the same hash: a set of them could take hours.

    Hashes that differ cost a bounded number of steps each, however they were chosen.
    """
    if type(items) is not list:
        raise TypeError("the items are not a list")
    if max(Counter(map(hash, items)).values(), default=0) > _MAX_EQUAL_HASHES:
        raise ValueError("too many equal hashes")
    return items


def _read_dict(body: Any) -> dict[Any, Any]:
    pairs = [(key, value) for key, value in body]
    _hashable([key for key, _ in pairs])
    return dict(pairs)


# A body of the wrong type raises TypeError, which `decode` reports as malformed.
_READERS: dict[str, Callable[[Any], Any]] = {
    "t": lambda body: tuple(list.__iter__(body)),
    "s": lambda body: set(_hashable(body)),
    "f": lambda body: frozenset(_hashable(body)),
    "d": _read_dict,
    "i": lambda body: int(body, 16),
    "l": lambda body: _MAKERS[body[0]](*body[1]),
}
