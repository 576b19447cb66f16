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


def test_objects_outside_the_vocabulary_cannot_travel() -> None:
    with pytest.raises(ProtocolError, match="object cannot be encoded"):
        encode(object())


@pytest.mark.parametrize("code", [0, 2, 127, -1])
def test_an_extension_other_than_an_array_is_refused(code: int) -> None:
    array = msgspec.msgpack.decode(encode(np.arange(3, dtype=np.int32)))
    assert decode(encode(Probe(rows=[np.arange(3, dtype=np.int32)])), Probe).rows[0].tolist()
    payload = msgspec.msgpack.encode(
        {"type": "Probe", "rows": [msgspec.msgpack.Ext(code, array.data)]}
    )
    with pytest.raises(ProtocolError):
        decode(payload, Probe)


def test_unknown_fields_are_refused() -> None:
    payload = msgspec.msgpack.encode({"type": "Probe", "rows": [], "extra": 1})
    with pytest.raises(ProtocolError, match="extra"):
        decode(payload, Probe)
    with pytest.raises(ProtocolError):
        decode(payload, PutGroup)
