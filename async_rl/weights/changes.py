"""The differences between two versions of a block, word by word, lossless.

An optimizer step at the learning rates of reinforcement learning is smaller than half the distance
between two neighbouring bfloat16 numbers for most weights, so most weights stay as they are.
Format: `values` has the new 16-bit words in the order of the block; `gaps` has, per value, the
number of unchanged words before it. A gap of 255 or more is written as bytes of 255, which have no
value, followed by a smaller one.
"""

from typing import Self

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from async_rl.core.errors import WeightsError
from async_rl.core.frozen import frozen

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]

# The largest byte: with more than 1 changed word in 255, nearly every gap takes one byte.
_SKIP = 255
PIECE = 1 << 24
"""Words compared at a time: positions take 8 bytes per word, which would be four models at once."""
_MOST = 0.5
"""Changes are sent up to this share of changed words: with 3 bytes each, 0.75 of all bytes."""


@frozen
class Changes:
    """gaps: uint8 [G], values: uint16 [C], C <= G."""

    gaps: Bytes
    values: Words

    @classmethod
    def between(cls, old: Words, new: Words) -> Self | None:
        """Return what to change in `old` to get `new`, None if that is most of it."""
        gaps = []
        values = []
        # The first value is counted from the position before the block.
        last = -1
        num_changed = 0
        for begin in range(0, new.size, PIECE):
            piece = slice(begin, begin + PIECE)
            positions = np.flatnonzero(old[piece] != new[piece]) + begin
            num_changed += positions.size
            if num_changed > _MOST * new.size:
                return None
            if positions.size:
                gaps.append(_encoded(np.diff(positions, prepend=last) - 1))
                values.append(new[positions])
                last = int(positions[-1])
        nothing = np.empty(0, np.uint8)
        return cls(
            gaps=np.concatenate([nothing, *gaps]),
            values=np.concatenate([nothing.astype(np.uint16), *values]),
        )

    def apply(self, block: Words) -> None:
        """Change the block in place. Raises WeightsError if it is too small for the changes."""
        last = -1
        used = 0
        for begin in range(0, self.gaps.size, PIECE):
            gaps = self.gaps[begin : begin + PIECE]
            has_value = gaps != _SKIP
            # A skip advances by its 255 words; a value by the words before it and its own.
            ends = last + np.cumsum(gaps.astype(np.int64) + has_value)
            positions = ends[has_value]
            if positions.size and positions[-1] >= block.size:
                raise WeightsError(
                    f"the changes reach word {positions[-1]} of a block of {block.size} words"
                )
            block[positions] = self.values[used : used + positions.size]
            last = int(ends[-1])
            used += positions.size

    def to_bytes(self) -> bytes:
        """Return a safetensors file with the changes."""
        content: bytes = save({"gaps": self.gaps, "values": self.values})
        return content

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Read such a file. Raises WeightsError if it is damaged."""
        try:
            found = load(content)
            gaps = found["gaps"]
            values = found["values"]
        except (SafetensorError, KeyError) as error:
            raise WeightsError(f"these are not changes of weights: {error!r}") from error
        if gaps.dtype != np.uint8 or values.dtype != np.uint16:
            raise WeightsError(f"changes have dtypes {gaps.dtype} and {values.dtype}")
        # A torn file would otherwise put values at wrong positions without an error.
        if np.count_nonzero(gaps != _SKIP) != values.size:
            raise WeightsError(f"{values.size} changed words do not fit their positions")
        return cls(gaps=gaps, values=values)


def _encoded(gaps: npt.NDArray[np.int64]) -> Bytes:
    """int64 [C] -> uint8 [G], skips inserted."""
    skips = gaps // _SKIP
    ends = np.cumsum(skips + 1) - 1
    result = np.full(ends[-1] + 1, _SKIP, np.uint8)
    result[ends] = gaps % _SKIP
    return result
