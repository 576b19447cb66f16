"""The differences between two versions of a block, word by word, lossless.

An optimizer step at the learning rates of reinforcement learning is smaller than half the distance
between two neighbouring bfloat16 numbers for most weights, so most weights stay as they are.
Format: `values` has the new 16-bit words in the order of the block; `gaps` has, for each of them,
the number of unchanged words before it. One word in 65,536 is written whether it changed or not, so
that each gap fits 16 bits.
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

_STRIDE = 1 << 16
PIECE = 1 << 24
"""Words compared at a time: positions take 8 bytes per word, which would be four models at once."""
_MOST = 0.375
"""Changes are sent up to this share of changed words: with 4 bytes each, 0.75 of all bytes."""


@frozen
class Changes:
    """gaps, values: uint16 [C]."""

    gaps: Words
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
            differs = old[piece] != new[piece]
            differs[::_STRIDE] = True
            positions = np.flatnonzero(differs) + begin
            num_changed += positions.size
            if num_changed > _MOST * new.size:
                return None
            gaps.append((np.diff(positions, prepend=last) - 1).astype(np.uint16))
            values.append(new[positions])
            last = int(positions[-1])
        return cls(gaps=np.concatenate(gaps), values=np.concatenate(values))

    def apply(self, block: Words) -> None:
        """Change the block in place. Raises WeightsError if it is too small for the changes."""
        last = -1
        for begin in range(0, self.gaps.size, PIECE):
            piece = slice(begin, begin + PIECE)
            positions = last + np.cumsum(self.gaps[piece].astype(np.int64) + 1)
            last = int(positions[-1])
            if last >= block.size:
                raise WeightsError(
                    f"the changes reach word {last} of a block of {block.size} words"
                )
            block[positions] = self.values[piece]

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
        if gaps.dtype != np.uint16 or values.dtype != np.uint16:
            raise WeightsError(f"changes have dtypes {gaps.dtype} and {values.dtype}")
        # A torn file would otherwise put values at wrong positions without an error.
        if gaps.shape != values.shape:
            raise WeightsError(f"{values.size} changed words do not fit {gaps.size} positions")
        return cls(gaps=gaps, values=values)
