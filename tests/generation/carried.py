"""What scenarios are asked and answer, as MessagePack: plain values, arrays and structs of the
product. Nothing that is read can run code.
"""

import importlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

KIND = "$kind"
"""The key of a map that stands for a value that MessagePack does not have."""


def encode(value: Any) -> bytes:
    """Raises TypeError for a value of another kind."""
    return msgspec.msgpack.encode(_plain(value))


def decode(data: bytes) -> Any:
    """Return what was encoded."""
    return _whole(msgspec.msgpack.decode(data))


def _plain(value: Any) -> Any:
    match value:
        case msgspec.Struct():
            fields = {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
            kind = type(value)
            return {KIND: f"{kind.__module__}:{kind.__name__}", "fields": fields}
        case np.ndarray():
            content = {"dtype": value.dtype.str, "shape": value.shape, "data": value.tobytes()}
            return {KIND: "array", **content}
        case np.generic():
            return value.item()
        case Path():
            return {KIND: "path", "text": str(value)}
        case dict():
            return {KIND: "dict", "items": [[_plain(k), _plain(v)] for k, v in value.items()]}
        case tuple() | set():
            return {KIND: type(value).__name__, "items": [_plain(each) for each in value]}
        case list():
            return [_plain(each) for each in value]
    return value


def _whole(value: Any) -> Any:
    if isinstance(value, list):
        return [_whole(each) for each in value]
    match value:
        case {"fields": fields}:
            module, _, name = value[KIND].partition(":")
            kind: Any = getattr(importlib.import_module(module), name)
            assert issubclass(kind, msgspec.Struct), kind
            return kind(**{name: _whole(each) for name, each in fields.items()})
        case {"dtype": dtype, "shape": shape, "data": data}:
            return np.frombuffer(data, dtype).reshape(shape).copy()
        case {"text": text}:
            return Path(text)
        case {"items": items}:
            kinds: dict[str, Any] = {"dict": dict, "tuple": tuple, "set": set}
            return kinds[value[KIND]](map(_whole, items))
    return value
