import collections
import contextlib
import datetime
import decimal
import fractions
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.sandbox.comparison import Comparison
from async_rl.sandbox.protocol import read_frames
from async_rl.sandbox.values import decode, encode

values_equal = Comparison(relative_tolerance=1e-9).values_equal
TEXT = st.text(st.characters(exclude_categories=[]))
NUMBERS = st.integers() | st.floats() | st.complex_numbers(allow_nan=False)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXT | st.binary()
HASHABLE = st.recursive(
    SCALARS.filter(lambda x: x == x),
    lambda c: st.tuples(c, c) | st.frozensets(c, max_size=3),
    max_leaves=5,
)
SETS = st.sets(HASHABLE, max_size=3)
VALUES = st.recursive(
    SCALARS | SETS,
    lambda c: st.lists(c, max_size=4) | st.tuples(c, c) | st.dictionaries(HASHABLE, c, max_size=3),
    max_leaves=12,
)


@given(VALUES)
def test_plain_value_survives_the_way_out(value: Any) -> None:
    again = decode(encode(value))
    assert repr(again) == repr(value) or values_equal(again, value)
    assert type(again) is type(value)


def test_large_integer_or_value_of_the_library_survives_the_way_out() -> None:
    for value in (
        decimal.Decimal("1.50"), fractions.Fraction(1, 3), range(1, 9, 2), collections.deque([1]),
        datetime.date(2026, 2, 28), datetime.time(1, 2, 3, 4), datetime.timedelta(-1, 2, 3),
        datetime.datetime(2026, 2, 28, 1, tzinfo=datetime.UTC), -(10**5000),
    ):  # fmt: skip
        again = decode(encode([value, (value,)]))
        assert again == [value, (value,)]
        assert type(again[0]) is type(value)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[1", b'{"z":1}', b'{"t":[1],"s":[2]}', b'{"s":[[1]]}', b'{"d":[[[1],2]]}',
        b'{"i":"0xzz"}', b'{"l":["bytes",[1]]}', b'{"l":["complex",["a",1]]}', b'{"u":[1,2]}',
        b'{"l":["Fraction",["1e999999999"]]}', b'{"l":["Fraction",[1,0]]}', b'{"l":["X",[]]}',
        b'{"l":["Decimal",["x"]]}', b'{"l":["timedelta",[99999999999999]]}', b"[" * 5000,
        b"[" * 5000 + b"]" * 5000, b'{"t":[' * 200 + b"]}" * 200, b"\xff", b"9" * 5000, b"1 2",
    ],
)  # fmt: skip
def test_malformed_bytes_raise_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode(data)


@given(st.binary(max_size=300))
def test_decoding_any_bytes_gives_a_value_or_value_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        decode(data)


@given(st.lists(st.binary(max_size=20), max_size=6))
def test_reading_any_frames_never_raises(lines: list[bytes]) -> None:
    read_frames(b"\n".join(lines), 9)


def test_no_more_frames_are_read_than_there_are_runs() -> None:
    """A program could fill its result with valid ones, whose reading would hold the event loop."""
    data = b"-1 l 0\n" + b"".join(b"%d v 1\n" % run for run in range(100_000))
    assert [frame.run for frame in read_frames(data, 2).frames] == [-1, 0, 1]
    assert not read_frames(data, 2).is_malformed
