"""An adapter as a value, and its file, which engines that apply adapters read."""

from __future__ import annotations

from collections.abc import Mapping

from safetensors.torch import save
from torch import Tensor

from async_rl.core.frozen import frozen


@frozen
class Adapter:
    """One version of an adapter. tensors: whole, float32, with the names of PEFT's files."""

    tensors: Mapping[str, Tensor]
    scaling: float

    def to_bytes(self, version: int) -> bytes:
        """Return a safetensors file with the tensors."""
        content: bytes = save(dict(self.tensors), {"version": str(version)})
        return content
