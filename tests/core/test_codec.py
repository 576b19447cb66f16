"""Facts about what may travel."""

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from async_rl.core.codec import decode, encode
from async_rl.core.errors import ProtocolError
from async_rl.core.types import IntArray
from async_rl.protocol.buffer import PutGroup
from async_rl.protocol.generator import Probe


@given(hnp.arrays(np.int32, hnp.array_shapes(max_dims=3, min_side=0)) | hnp.arrays(np.bool_, 7))
def test_arrays_come_back_with_dtype_shape_and_values(array: IntArray) -> None:
    back = decode(encode(Probe(rows=[array])), Probe).rows[0]
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert np.array_equal(back, array)


@given(st.binary(max_size=64))
@example(b"\x81\xa5\x00\x00\x00\x00\x80")  # a name that is no UTF-8
def test_arbitrary_bytes_never_raise_anything_but_protocol_errors(data: bytes) -> None:
    for payload in (
        data,
        msgspec.msgpack.encode({"type": "Probe", "rows": [msgspec.msgpack.Ext(1, data)]}),
    ):
        try:
            decode(payload, Probe)
        except ProtocolError:
            continue


def test_other_objects_extensions_and_fields_are_refused() -> None:
    with pytest.raises(ProtocolError, match="object cannot be encoded"):
        encode(object())
    array = msgspec.msgpack.decode(encode(np.arange(3, dtype=np.int32)))
    for code in (0, 2, 127, -1):
        rows = [msgspec.msgpack.Ext(code, array.data)]
        with pytest.raises(ProtocolError):
            decode(msgspec.msgpack.encode({"type": "Probe", "rows": rows}), Probe)
    payload = msgspec.msgpack.encode({"type": "Probe", "rows": [], "extra": 1})
    with pytest.raises(ProtocolError, match="extra"):
        decode(payload, Probe)
    with pytest.raises(ProtocolError):
        decode(payload, PutGroup)
