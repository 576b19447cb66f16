from __future__ import annotations

import collections
import contextlib
import datetime
import decimal
import fractions
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.sandbox.comparison import Comparison
from async_rl.sandbox.protocol import Kind, read_frames
from async_rl.sandbox.values import Foreign, decode, encode, plain

values_equal = Comparison(relative_tolerance=1e-9).values_equal
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=[]))
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
HASHABLE = st.recursive(
    SCALARS.filter(lambda x: x == x),
    lambda c: st.tuples(c, c) | st.frozensets(c, max_size=3),
    max_leaves=5,
)
VALUES = st.recursive(
    SCALARS,
    lambda c: (
        st.lists(c, max_size=4)
        | st.tuples(c, c)
        | st.sets(HASHABLE, max_size=3)
        | st.dictionaries(HASHABLE, c, max_size=3)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_plain_value_survives_the_way_out(value: Any) -> None:
    again = decode(encode(value))
    assert repr(again) == repr(value) or values_equal(again, value)
    assert type(again) is type(value)


def test_subclasses_arrive_as_foreign_values() -> None:
    class Int(int): ...

    data = encode([Int(9), collections.Counter("aa"), iter([1]), object()])
    got = decode(data)
    assert all(isinstance(v, Foreign) for v in got)
    assert decode(data, plain)[:2] == [9, {"a": 2}]


@pytest.mark.parametrize(
    "value",
    [
        decimal.Decimal("1.50"), fractions.Fraction(1, 3), range(1, 9, 2), collections.deque([1]),
        datetime.date(2026, 2, 28), datetime.time(1, 2, 3, 4), datetime.timedelta(-1, 2, 3),
        datetime.datetime(2026, 2, 28, 1, tzinfo=datetime.UTC), 10**5000, -(10**5000),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_large_integer_or_value_of_the_library_survives_the_way_out(value: Any) -> None:
    again = decode(encode([value, (value,)]))
    assert again == [value, (value,)]
    assert type(again[0]) is type(value)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[1", b'{"z":1}', b'{"t":1}', b'{"t":[1],"s":[2]}', b'{"s":[[1]]}',
        b'{"d":[1]}', b'{"d":[[[1],2]]}', b'{"i":5}', b'{"i":"0xzz"}',
        b'{"l":["bytes",["zz"]]}', b'{"l":["bytes",[1]]}', b'{"l":["complex",["a",1]]}',
        b'{"u":[1]}', b'{"u":[1,2]}',
        b'{"l":["Fraction",["1e999999999"]]}', b'{"l":["Fraction",[1,0]]}', b'{"l":["X",[]]}',
        b'{"l":["Decimal",["x"]]}', b'{"l":["timedelta",[99999999999999]]}',
        b"[" * 5000, b"[" * 5000 + b"]" * 5000,
        b'{"t":[' * 200 + b"]}" * 200, b"\xff", b"9" * 5000, b"nul", b"1 2",
    ],
)  # fmt: skip
def test_malformed_bytes_raise_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode(data)


def test_set_made_to_collide_is_refused() -> None:
    data = ('{"s":[' + ",".join(str((2**61 - 1) * i) for i in range(500)) + "]}").encode()
    with pytest.raises(ValueError, match="equal hashes"):
        decode(data)


@given(st.binary(max_size=300))
def test_decoding_any_bytes_gives_a_value_or_value_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        decode(data)


@given(st.lists(st.binary(max_size=20), max_size=6))
def test_reading_any_frames_never_raises(lines: list[bytes]) -> None:
    read_frames(b"\n".join(lines), 9)


def test_frames_are_read_in_order_up_to_the_first_wrong_one() -> None:
    read = read_frames(b"-1 l 0\n0 v [1, 2]\n2 v 1\n", 9)
    assert [(f.run, f.kind, f.body) for f in read.frames] == [
        (-1, Kind.LOADED, b"0"),
        (0, Kind.VALUE, b"[1, 2]"),
    ]
    assert read.is_malformed
    assert not read_frames(b"-1 l 0\n0 v [1", 9).is_malformed


def test_no_more_frames_are_read_than_there_are_runs() -> None:
    """A program could fill its result with valid ones, whose reading would hold the event loop."""
    data = b"-1 l 0\n" + b"".join(b"%d v 1\n" % run for run in range(100_000))
    assert [frame.run for frame in read_frames(data, 2).frames] == [-1, 0, 1]
    assert not read_frames(data, 2).is_malformed


@pytest.mark.parametrize(
    ("value", "expected", "is_equal"),
    [
        ([1, "a", {"k": (1, 2.0)}], [1, "a", {"k": (1, 2.0)}], True), (0.1 + 0.2, 0.3, True),
        (math.nan, math.nan, True), (True, 1, False), (1.0, 1, False), ((1,), [1], False),
        ({1: 1}, {True: 1}, False), ({1}, {1.0}, False), ([1, 2], [1], False),
        (0.3001, 0.3, False), (math.inf, 1e308, False),
    ],
)  # fmt: skip
def test_equality_is_of_exact_types(value: object, expected: object, is_equal: bool) -> None:
    assert values_equal(value, expected) is is_equal
