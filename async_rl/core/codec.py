"""MessagePack for every typed value of the project, numpy arrays included; used on the wire and in
the store.

An array is extension type 1: one byte for the dtype, one for the number of dimensions, each
dimension as uint32, then the raw little-endian bytes.  A one-dimensional array of few runs of equal
values (masks, versions) is extension type 2 if that is shorter: the same head, then the length of
each run as uint32, then the value of each run.  Only the dtypes in `_DTYPES` are allowed, so no
payload can name code or objects.  Decoded arrays are read-only.
"""

from __future__ import annotations

import functools
import struct
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from async_rl.core.errors import ProtocolError

T = TypeVar("T")
Array = npt.NDArray[Any]
_ARRAY = 1
_RUNS = 2
_LENGTH = np.dtype("<u4")
# A few bytes can stand for any number of values; far above any trajectory, and 256 MB of int32.
_MOST_EXPANDED = 2**26
# The position is the number in every stored payload, so new kinds come at the end.
_DTYPES = (np.dtype("<i4"), np.dtype("<f4"), np.dtype("?"), np.dtype("<i8"), np.dtype("u1"))
_KINDS = {dtype: kind for kind, dtype in enumerate(_DTYPES)}


@functools.cache
def _head(num_dimensions: int) -> struct.Struct:
    return struct.Struct(f"<BB{num_dimensions}I")


def _enc_hook(value: Any) -> msgspec.msgpack.Ext:
    if isinstance(value, np.ndarray) and value.dtype in _KINDS:
        head = _head(value.ndim).pack(_KINDS[value.dtype], value.ndim, *value.shape)
        runs = _runs(value)
        if runs is not None:
            return msgspec.msgpack.Ext(_RUNS, head + runs)
        return msgspec.msgpack.Ext(_ARRAY, head + value.tobytes())
    raise ProtocolError(
        f"{type(value).__name__} cannot be encoded; allowed are messages, plain values and arrays"
        f" of {[str(d) for d in _DTYPES]}"
    )


def _runs(array: Array) -> bytes | None:
    """Return lengths and values of the array's runs, or None if its own bytes are fewer."""
    # Log-probs have no runs except over the prompt, and NaN is not equal to itself.
    if array.ndim != 1 or array.dtype.kind == "f" or not array.size:
        return None
    # A run starts where a value differs from its predecessor.
    starts = np.flatnonzero(array[1:] != array[:-1]) + 1
    if (len(starts) + 1) * (_LENGTH.itemsize + array.itemsize) >= array.nbytes:
        return None
    bounds = np.concatenate(([0], starts, [len(array)]))
    lengths = np.diff(bounds).astype(_LENGTH)
    return b"".join((lengths.tobytes(), array[bounds[:-1]].tobytes()))


def _expanded(data: bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Invert `_runs`. Raises ValueError if the runs do not fill the shape."""
    num_runs = len(data) // (_LENGTH.itemsize + dtype.itemsize)
    lengths = np.frombuffer(data, dtype=_LENGTH, count=num_runs).astype(np.int64)
    values = np.frombuffer(data, dtype=dtype, offset=num_runs * _LENGTH.itemsize)
    # Before the array is made: the lengths come from another process and may claim any size.
    if shape != (lengths.sum(),) or shape[0] > _MOST_EXPANDED:
        raise ValueError(f"runs of {lengths.sum()} values in shape {shape}")
    array = np.repeat(values, lengths)
    array.flags.writeable = False
    return array


def _ext_hook(code: int, data: memoryview) -> Any:
    if code not in (_ARRAY, _RUNS):
        raise ProtocolError(f"extension type {code} is unknown")
    try:
        kind, ndim = struct.unpack_from("<BB", data)
        shape = struct.unpack_from(f"<{ndim}I", data, 2)
        # A copy: a view would keep the whole message in memory for as long as one of its arrays.
        body = bytes(data[2 + 4 * ndim :])
        if code == _RUNS:
            return _expanded(body, _DTYPES[kind], shape)
        return np.frombuffer(body, dtype=_DTYPES[kind]).reshape(shape)
    except (struct.error, IndexError, ValueError) as error:
        raise ProtocolError(f"malformed array: {error}") from error


def _dec_hook(expected: Any, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value
    raise ProtocolError(f"expected an array, got {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_enc_hook)
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def encode(value: object) -> bytes:
    """One value as MessagePack. Raises ProtocolError for types that are not allowed."""
    return _encoder.encode(value)


def decode(data: bytes | memoryview, expected: type[T]) -> T:
    """The value of type `expected` in `data`. Raises ProtocolError if it is anything else."""
    # A decoder is compiled for its type, which takes longer than to decode a short message.
    if expected not in _decoders:
        decoder = msgspec.msgpack.Decoder(expected, dec_hook=_dec_hook, ext_hook=_ext_hook)
        _decoders[expected] = decoder
    try:
        result: T = _decoders[expected].decode(data)
    # Nesting without end is a fault of the sender too, and must not look like one of this process.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a valid {expected}: {error}") from error
    return result
