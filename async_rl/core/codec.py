"""MessagePack for every typed value of the project, numpy arrays included; used on the wire and in
the store.

An array is extension type 1: one byte for the dtype, one for the number of dimensions, each
dimension as uint32, then the raw little-endian bytes.  Only the dtypes in `_DTYPES` are allowed, so
no payload can name code or objects.  Decoded arrays are read-only.
"""

import functools
import struct
from typing import Any, TypeVar

import msgspec
import numpy as np

from async_rl.core.errors import ProtocolError

T = TypeVar("T")
_ARRAY = 1
_MOST_BYTES = 1 << 31
# The position is the number in every stored payload, so new kinds come at the end.
_DTYPES = tuple(np.dtype(name) for name in ("<i4", "<f4", "?", "<i8", "u1"))
_KINDS = {dtype: kind for kind, dtype in enumerate(_DTYPES)}


def enc_hook(value: Any) -> msgspec.msgpack.Ext:
    """Encode an array."""
    if isinstance(value, np.ndarray) and value.dtype in _KINDS:
        kind = _KINDS[value.dtype]
        head = struct.pack(f"<BB{value.ndim}I", kind, value.ndim, *value.shape)
        return msgspec.msgpack.Ext(_ARRAY, head + value.tobytes())
    raise ProtocolError(
        f"{type(value).__name__} cannot be encoded; allowed are messages, plain values and arrays"
        f" of {[str(d) for d in _DTYPES]}"
    )


def _ext_hook(code: int, data: memoryview) -> Any:
    if code != _ARRAY:
        raise ProtocolError(f"extension type {code} is unknown")
    try:
        kind, ndim = struct.unpack_from("<BB", data)
        shape = struct.unpack_from(f"<{ndim}I", data, 2)
        # A copy: a view would keep the whole message in memory for as long as one of its arrays.
        body = bytes(data[2 + 4 * ndim :])
        return np.frombuffer(body, dtype=_DTYPES[kind]).reshape(shape)
    except (struct.error, IndexError, ValueError) as error:
        raise ProtocolError(f"malformed array: {error}") from error


def _dec_hook(expected: Any, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value
    raise ProtocolError(f"expected an array, got {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=enc_hook)
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def compressed(data: bytes) -> bytes:
    """Return the data compressed, after its size as 4 bytes."""
    body: bytes = _zstd().compress(data, asbytes=True)
    return len(data).to_bytes(4, "little") + body


def decompressed(data: bytes | memoryview) -> bytes:
    """Invert `compressed`. Raises ProtocolError."""
    size = int.from_bytes(data[:4], "little")
    if size > _MOST_BYTES:
        raise ProtocolError(f"{size} bytes are compressed; {_MOST_BYTES} are the most")
    try:
        whole: bytes = _zstd().decompress(data[4:], size, asbytes=True)
    except (OSError, ValueError) as error:
        raise ProtocolError(f"malformed compression: {error}") from error
    return whole


@functools.cache
def _zstd() -> Any:
    # Here: processes without groups need not load it.
    import pyarrow

    # Level 1 has 400 MB/s. Higher levels and zlib are slower and hardly smaller.
    return pyarrow.Codec("zstd", 1)


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
