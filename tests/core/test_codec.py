"""Facts about what may travel."""

import struct

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from async_rl.core.codec import decode, encode
from async_rl.core.errors import ProtocolError
from async_rl.core.types import IntArray, Score, Trajectory
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
        msgspec.msgpack.encode({"type": "Probe", "rows": [msgspec.msgpack.Ext(2, data)]}),
    ):
        try:
            decode(payload, Probe)
        except ProtocolError:
            continue


@given(
    st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 200)), max_size=30),
    st.sampled_from([np.int32, np.bool_, np.int64, np.uint8]),
)
def test_runs_of_equal_values_come_back_and_never_cost_more(
    runs: list[tuple[int, int]], dtype: type
) -> None:
    values = np.array([value for value, _ in runs], dtype=np.int64).astype(dtype)
    array = np.repeat(values, [length for _, length in runs])
    payload = encode(array)
    back = decode(encode(Probe(rows=[array])), Probe).rows[0]
    assert (back.dtype, back.tolist()) == (array.dtype, array.tolist())
    assert not back.flags.writeable
    assert len(payload) <= array.nbytes + 12
    assert len(payload) <= len(runs) * (4 + array.itemsize) + 12


def test_a_trajectory_of_32k_tokens_takes_8_bytes_per_token_instead_of_13() -> None:
    length, prompt = 32_768, 512
    rng = np.random.default_rng(0)
    sample = Trajectory(
        token_ids=rng.integers(0, 150_000, length, dtype=np.int32),
        prompt_length=prompt,
        loss_mask=np.arange(length) >= prompt,
        behavior_logprobs=-rng.random(length, dtype=np.float32),
        # A push in the middle of the response.
        versions=np.repeat(np.array([-1, 7, 8], dtype=np.int32), [prompt, 20_000, 12_256]),
        is_truncated=False,
        score=Score(reward=1.0, parts={}, verdicts=(), latency_s=0.1),
    )
    arrays = (sample.token_ids, sample.loss_mask, sample.behavior_logprobs, sample.versions)
    assert sum(array.nbytes for array in arrays) == 13 * length
    assert len(encode(sample)) < 8 * length + 400


@pytest.mark.parametrize(
    ("shape", "lengths"),
    [(4, [3]), (4, [5]), (2**32 - 1, [2**32 - 1]), (0, [2**31, 2**31])],
)
def test_runs_that_do_not_fill_their_array_or_fill_the_memory_are_refused(
    shape: int, lengths: list[int]
) -> None:
    data = struct.pack(f"<BBI{len(lengths)}I", 2, 1, shape, *lengths) + b"\1" * len(lengths)
    payload = msgspec.msgpack.encode({"type": "Probe", "rows": [msgspec.msgpack.Ext(2, data)]})
    with pytest.raises(ProtocolError, match="malformed array: runs of"):
        decode(payload, Probe)


def test_objects_outside_the_vocabulary_cannot_travel() -> None:
    with pytest.raises(ProtocolError, match="object cannot be encoded"):
        encode(object())


@pytest.mark.parametrize("code", [0, 3, 127, -1])
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
