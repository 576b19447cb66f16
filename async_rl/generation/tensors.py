"""The tensors of a shared block as torch sees them, without a copy. Used by both engines."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from async_rl.errors import WeightsError
from async_rl.wire.shared_tensors import SharedTensorsReader

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def tensor_views(reader: SharedTensorsReader) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor with its name; valid until the reader is closed. Raises WeightsError if shape or dtype do not fit."""
    for entry, data in reader.tensors():
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise WeightsError(f"{entry.name} has dtype {entry.dtype}; allowed are {', '.join(_DTYPES)}")
        try:
            yield entry.name, torch.frombuffer(data, dtype=dtype).reshape(entry.shape)
        except (RuntimeError, ValueError) as error:
            raise WeightsError(
                f"{entry.name} of shape {entry.shape} and {entry.dtype} does not fit {entry.size_bytes} bytes: {error}"
            ) from error
