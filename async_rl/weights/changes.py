"""The differences between two versions of a tensor, word by word, lossless.

An optimizer step at the learning rates of reinforcement learning is smaller than half the distance
between two neighbouring bfloat16 numbers for most weights, so most weights stay as they are.
Format: int16 [2, C]. The first row has, for each changed 16-bit word, the number of unchanged words
before it, the second row has the new words. One word in 32,768 is listed whether it changed or not,
so that each gap fits.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from async_rl.config.run import MOST_CHANGED
from async_rl.core.errors import WeightsError
from async_rl.core.frozen import frozen
from async_rl.protocol.weights import Difference, Manifest, TensorEntry
from async_rl.weights.tensors import ALIGN, layout, part_of, tensor_bytes, tensor_spec, word_sum

_STRIDE = 1 << 15
PIECE = 1 << 24
"""Words compared at a time: positions take 8 bytes per word."""


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
