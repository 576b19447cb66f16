"""The files of a checkpoint: the safetensors file of each rank, and the index, which says what file
has which rows of each tensor, and all that is no tensor.

docs/checkpoints.md describes the format for readers without this project.
"""

import hashlib
import os
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from torch import Tensor

from async_rl.core.errors import DataError
from async_rl.core.frozen import Value
from async_rl.weights.tensors import header, tensor_spec

INDEX_FILE = "index.json"
# A thousand ranks with a thousand tensors each need 100 MB.
_MAX_BYTES = 1 << 30
# Every disk accepts this alignment of memory, offsets and lengths without a cache.
_ALIGN = 4096
_PIECE_BYTES = 64 << 20
Size = Annotated[int, msgspec.Meta(ge=0)]
# No other name, so none leads out of the directory.
FileName = Annotated[str, msgspec.Meta(pattern=r"^rank_[0-9]{4,6}\.safetensors\Z")]


class Stored(Value):
    """A tensor. dtype: as in safetensors; pieces: file, first row in it, row after its last one, in
    the order of the rows.
    """

    dtype: str
    shape: Annotated[list[Size], msgspec.Meta(min_length=1)]
    pieces: list[tuple[FileName, Size, Size]]


class Optimizer(Value):
    """An optimizer. settings: of AdamW for matrices, as information: a resume has its own."""

    num_steps: float
    settings: dict[str, Any]


class Index(Value):
    """A checkpoint. objective: as `ObjectiveState.numbers`; base_sha256: of the weights that its
    adapter belongs to, empty without one.
    """

    format: Literal[3]
    version: Size
    optimizers: dict[str, Optimizer]
    objective: tuple[float, float, float, float]
    base_sha256: str
    tensors: dict[str, Stored]


def file_of(rank: int) -> str:
    """Return the name of the file of a rank."""
    return f"rank_{rank:04d}.safetensors"


def open_shard(path: Path) -> Any:
    """Open a safetensors file for slices of its tensors. Raises DataError that names it."""
    from safetensors import SafetensorError, safe_open  # of an extra

    try:
        return safe_open(regular(path), framework="pt")
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} is damaged: {error}") from error


def regular(path: Path) -> Path:
    """Return the path of a file. Raises OSError if there is none, DataError for another thing."""
    # The opening of a pipe would wait, and a link may lead anywhere.
    if not stat.S_ISREG(path.lstat().st_mode):
        raise DataError(f"{path} is not a regular file; restore it from a copy")
    return path


def read_index(directory: Path) -> Index:
    """Read the index of a checkpoint. Raises DataError."""
    path = directory / INDEX_FILE
    if not path.exists():
        raise DataError(
            f"{directory} is not a checkpoint; name a directory such as checkpoints/step_000020"
            " of a run"
        )
    try:
        with regular(path).open("rb") as file:
            index = msgspec.json.decode(file.read(_MAX_BYTES), type=Index)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}; restore it from a copy") from error
    for name, stored in index.tensors.items():
        rows = [row for _, *span in stored.pieces for row in span]
        edges = [0, *rows, stored.shape[0]]
        # Each piece starts where the previous piece stops.
        if edges[::2] != edges[1::2] or edges != sorted(edges):
            raise DataError(
                f"{path} is damaged: {name} of shape {stored.shape} has pieces from and to the rows"
                f" {rows}; restore it from a copy"
            )
    return index


class Staging:
    """The image of one safetensors file in main memory, written past the kernel's cache.

    The memory is allocated at the first use and kept: new memory costs several times the copy.
    `fill` must not run during `write`.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._size_bytes = 0

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Make the image of a file with these tensors; elements of one byte are last."""
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
