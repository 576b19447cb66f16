"""Tensors as bytes: their place in a block, their types, and sums of their words."""

from collections.abc import Iterable, Iterator

import torch
from msgspec.structs import replace

from async_rl.core.errors import WeightsError
from async_rl.protocol.weights import Manifest, TensorEntry

Tensors = Iterator[tuple[str, torch.Tensor]]
"""Each tensor of a version with its Hugging Face name."""

# A cache line, and a multiple of the 8 bytes that the checksum adds.
ALIGN = 64
CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int16": "I16", "uint8": "U8"}
"""The names that safetensors has for torch's dtypes. Media carry these only."""


def tensor_spec(name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> TensorEntry:
    """Return the entry of a tensor, before `layout` gives it a place in the block. dtype: in the
    block, None = the dtype of the tensor.
    """
    dtype = dtype or tensor.dtype
    return TensorEntry(
        name=name,
        dtype=str(dtype).removeprefix("torch."),
        shape=list(tensor.shape),
        offset=0,
        size_bytes=tensor.numel() * dtype.itemsize,
    )


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor of any dtype: uint8 [size], a view if it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def dtype_of(entry: TensorEntry) -> torch.dtype:
    """Return the entry's dtype. Raises WeightsError for a dtype that no medium carries."""
    if entry.dtype not in CODES:
        raise WeightsError(f"{entry.name} has dtype {entry.dtype}; allowed are {', '.join(CODES)}")
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return dtype


def part_of(block: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """uint8 [size of the block] -> the bytes of a tensor in it, a view."""
    return block[entry.offset : entry.offset + entry.size_bytes]


def tensor_of(entry: TensorEntry, flat: torch.Tensor) -> torch.Tensor:
    """uint8 [size_bytes] -> a view of the entry's dtype and shape. Raises WeightsError."""
    dtype = dtype_of(entry)
    try:
        return flat.view(dtype).reshape(entry.shape)
    except RuntimeError as error:
        raise WeightsError(
            f"{entry.name} of shape {entry.shape} and {entry.dtype} does not fit {entry.size_bytes}"
            f" bytes: {error}"
        ) from error


def layout(specs: Iterable[TensorEntry]) -> tuple[list[TensorEntry], int]:
    """Arrange tensors one after another; returns the entries and the size of the whole block."""
    offset = ALIGN
    entries = []
    for spec in specs:
        entries.append(replace(spec, offset=offset))
        offset += -(-spec.size_bytes // ALIGN) * ALIGN
    return entries, offset


def checksum(content: bytes) -> int:
    """Sum of the 64-bit words modulo 2^64, the last one filled up with zeros.

    As fast as memory, and enough to detect a torn or partial copy.
    """
    # torch takes no read-only memory.
    return int(word_sum(torch.frombuffer(bytearray(content), dtype=torch.uint8))) % 2**64


def word_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's part of the checksum of a block, int64 [] on its device: the sum of its
    64-bit words modulo 2^64, the last one filled up with zeros as in the block.
    """
    flat = tensor_bytes(tensor)
    num_missing = -flat.numel() % 8
    # Padding copies the whole tensor, also by nothing, as a part of a tensor needs that does not
    # begin at a word.
    if num_missing or flat.storage_offset() % 8:
        flat = torch.nn.functional.pad(flat, (0, num_missing))
    return flat.view(torch.int64).sum()


def summed(tensors: Iterable[torch.Tensor], sums: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors, and add the sum of each to `sums`."""
    for tensor in tensors:
        sums.append(word_sum(tensor))
        yield tensor


def require_checksum(manifest: Manifest, actual: int, source: str) -> None:
    """Raise WeightsError unless the bytes from the source have the manifest's checksum."""
    if actual != manifest.checksum:
        raise WeightsError(
            f"checksum of version {manifest.version} {source} is {actual}, announced"
            f" {manifest.checksum}"
        )
