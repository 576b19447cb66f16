"""The tensors of one safetensors file, copied to main memory and written in the background."""

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from async_rl.learner.host_memory import Copies
from async_rl.weights.files import header
from async_rl.weights.tensors import tensor_bytes, tensor_spec


class Staging:
    """The content of one file; `fill` must not run during `write`."""

    def __init__(self) -> None:
        self._copies = Copies()
        self._pieces: list[Any] = []

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors, those of one byte per element last."""
        specs = (tensor_spec(name, tensor) for name, tensor in tensors.items())
        copies = [self._copies.copy(name, tensor) for name, tensor in tensors.items()]
        self._pieces = [header(specs, {"format": "pt"})]
        self._pieces += [tensor_bytes(copy).numpy() for copy in copies]
        self._copies.wait()

    def write(self, path: Path) -> bytes:
        """Write the file and return its SHA-256 once it is on the disk."""
        # From memory, while it is written: the file need not be read again.
        with ThreadPoolExecutor(max_workers=1) as hashing, path.open("wb") as file:
            digest = hashing.submit(self._digest)
            file.writelines(self._pieces)
            file.flush()
            os.fsync(file.fileno())
            # It is not read soon, and its pages would displace the store and the model files.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return digest.result()

    def _digest(self) -> bytes:
        digest = hashlib.sha256()
        for piece in self._pieces:
            digest.update(piece)
        return digest.digest()
