"""The image of one safetensors file in main memory, written past the kernel's cache.

The memory is allocated at the first use and kept: new memory costs several times the copy.
"""

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from async_rl.weights.tensors import header, tensor_spec

# Every disk accepts this alignment of memory, offsets and lengths without a cache.
_ALIGN = 4096
_PIECE_BYTES = 64 << 20


class Staging:
    """One image; `fill` must not run during `write`."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._size_bytes = 0

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Make the image of a file with these tensors, those of one byte per element last."""
        specs = (tensor_spec(name, tensor) for name, tensor in tensors.items())
        head = header(specs, {"format": "pt"})
        self._size_bytes = len(head) + sum(tensor.nbytes for tensor in tensors.values())
        if len(self._memory) < self._size_bytes + _ALIGN:
            # Freed first: both may not fit.
            self._memory = torch.empty(0, dtype=torch.uint8)
            has_gpu = torch.cuda.is_available()
            size = self._size_bytes + 2 * _ALIGN
            memory = torch.empty(size, dtype=torch.uint8, pin_memory=has_gpu)
            self._memory = memory[-memory.data_ptr() % _ALIGN :]
        end = len(head)
        self._memory[:end] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        for tensor in tensors.values():
            begin = end
            end = begin + tensor.nbytes
            target = self._memory[begin:end].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor, non_blocking=True)
        if self._memory.is_pinned():
            torch.cuda.synchronize()

    def write(self, path: Path) -> bytes:
        """Write the file and return its SHA-256 once it is on the disk."""
        image: Any = self._memory.numpy()
        # From memory, while it is written: the file need not be read again.
        with ThreadPoolExecutor(max_workers=1) as hashing:
            digest = hashing.submit(hashlib.sha256, image[: self._size_bytes])
            try:
                self._write(path, memoryview(image), os.O_DIRECT)
            except OSError:
                # Some file systems refuse it at the opening, others at the first write. A full
                # disk fails again.
                self._write(path, memoryview(image), 0)
        return digest.result().digest()

    def _write(self, path: Path, image: memoryview, flag: int) -> None:
        rest = image[: -(-self._size_bytes // _ALIGN) * _ALIGN]
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flag, 0o666)
        try:
            while rest:
                rest = rest[os.write(fd, rest[:_PIECE_BYTES]) :]
            os.ftruncate(fd, self._size_bytes)
            os.fsync(fd)
        finally:
            os.close(fd)
