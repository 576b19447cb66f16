"""Tensors as bytes: their place in a block, their types, the sums of their words, the words
that differ between two versions, and the start of a safetensors file.

An optimizer step at the learning rates of reinforcement learning is smaller than half the distance
between two neighbouring bfloat16 numbers for most weights, so most words stay as they are. Format
of a list of changes: int16 [2, C]. The first row has, for each changed 16-bit word, the number of
unchanged words before it, the second row has the new words. One word in 32,768 is listed whether it
changed or not, so that each gap fits. The list is lossless.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from async_rl.config.run import MOST_CHANGED
from async_rl.core.errors import WeightsError
from async_rl.core.frozen import frozen
from async_rl.protocol.weights import Difference, Manifest, TensorEntry

Tensors = Iterator[tuple[str, Tensor]]
"""Each tensor of a version with its Hugging Face name."""

# A cache line, and a multiple of the 8 bytes that the checksum adds.
ALIGN = 64
CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int16": "I16", "uint8": "U8"}
"""The names that safetensors has for torch's dtypes. Media carry these only."""
# safetensors aligns the data to 8 bytes, and readers map it into memory.
_FILE_ALIGN = 8
_STRIDE = 1 << 15
PIECE = 1 << 24
"""Words compared at a time: positions take 8 bytes per word."""


def tensor_spec(name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> TensorEntry:
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


def tensor_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor of any dtype: uint8 [size], a view if it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def dtype_of(entry: TensorEntry) -> torch.dtype:
    """Return the entry's dtype. Raises WeightsError for a dtype that no medium carries."""
    if entry.dtype not in CODES:
        raise WeightsError(f"{entry.name} has dtype {entry.dtype}; allowed are {', '.join(CODES)}")
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return dtype


def part_of(block: Tensor, entry: TensorEntry) -> Tensor:
    """uint8 [size of the block] -> the bytes of a tensor in it, a view."""
    return block[entry.offset : entry.offset + entry.size_bytes]


def tensor_of(entry: TensorEntry, flat: Tensor) -> Tensor:
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


def word_sum(tensor: Tensor) -> Tensor:
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


def summed(tensors: Iterable[Tensor], sums: list[Tensor]) -> Iterator[Tensor]:
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


@frozen
class Changes:
    """What changed in a block. content: uint8 [size], the lists, as `difference` describes them."""

    difference: Difference
    content: Tensor


class Comparison:
    """Collects what changes in a block. entries: its tensors; base: the version before.

    cuda: torch.cuda, where new tensors are on a GPU.
    """

    def __init__(
        self, entries: Sequence[TensorEntry], *, version: int, base: int, cuda: Any = None
    ) -> None:
        self._entries = entries
        self._version = version
        self._base = base
        self._lists: list[Tensor] = []
        self._cuda = cuda
        self._stream = cuda and cuda.Stream()
        self._most_words = MOST_CHANGED * sum(entry.size_bytes for entry in entries) / 2

    def add(self, old: Tensor, new: Tensor) -> None:
        """Compare the next tensor of the block, uint8 [size_bytes]."""
        if self._most_words >= 0:
            if self._cuda is None:
                old = old.to(new.device)
            else:
                # While the tensor before this one is copied to the block: the bus has two ways.
                with self._cuda.stream(self._stream):
                    old = old.to(new.device, non_blocking=True)
                present = self._cuda.current_stream()
                present.wait_stream(self._stream)
                old.record_stream(present)
            # To main memory: next to what is trained, a device may have no room for all lists.
            self._lists.append(compared(old.view(torch.int16), new.view(torch.int16)).cpu())
            self._most_words -= self._lists[-1].shape[1]

    def result(self) -> Changes | None:
        """Return the changes of all tensors; None if too much changed."""
        if self._most_words < 0:
            return None
        pairs = zip(self._entries, self._lists, strict=True)
        entries, total_bytes = layout(tensor_spec(entry.name, words) for entry, words in pairs)
        content = torch.zeros(total_bytes, dtype=torch.uint8)
        for entry in entries:
            # Released as it is copied: the plan counts one copy.
            part_of(content, entry)[:] = tensor_bytes(self._lists.pop(0))
        manifest = Manifest(
            version=self._version,
            path="",
            tensors=entries,
            total_bytes=total_bytes,
            checksum=int(word_sum(content[ALIGN:])) % 2**64,
        )
        difference = Difference(base=self._base, manifest=manifest)
        return Changes(difference=difference, content=content)


def compared(old: Tensor, new: Tensor) -> Tensor:
    """int16 [W], int16 [W] on one device -> the changes, int16 [2, C], there."""
    parts = []
    for begin in range(0, new.numel(), PIECE):
        words = new[begin : begin + PIECE]
        differs = old[begin : begin + PIECE] != words
        differs[::_STRIDE] = True
        # So that the first gap of the next piece starts at that piece.
        differs[-1] = True
        positions = differs.nonzero().squeeze(1)
        gaps = torch.diff(positions, prepend=positions.new_tensor([-1])) - 1
        parts.append(torch.stack([gaps.to(torch.int16), words[positions]]))
    return torch.cat(parts, 1)


def listed(changes: Tensor, num_words: int) -> tuple[Tensor, Tensor]:
    """int16 [2, C] -> positions int64 [C], in order, and new words int16 [C], of a tensor.

    Raises WeightsError if they do not fit its number of words.
    """
    gaps, words = changes
    positions = (gaps.long() + 1).cumsum(0) - 1
    if bool((gaps < 0).any()) or int(positions[-1]) >= num_words:
        raise WeightsError(
            f"the changes reach word {int(positions[-1])} of a tensor of {num_words} words"
        )
    return positions, words


def version_header(manifest: Manifest) -> bytes:
    """Return the start of the file of a version."""
    facts = {"version": str(manifest.version), "checksum": str(manifest.checksum)}
    return header(manifest.tensors, facts)


def header(specs: Iterable[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """Return the start of a safetensors file: size of the JSON in 8 bytes, then the JSON, padded
    with spaces.
    """
    entries: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for spec in specs:
        begin = end
        end = begin + spec.size_bytes
        entries[spec.name] = {
            "dtype": CODES[spec.dtype],
            "shape": spec.shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _FILE_ALIGN)
    return len(text).to_bytes(8, "little") + text
