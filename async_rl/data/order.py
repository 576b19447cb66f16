"""The order of training prompts: epochs over the prompts, each shuffled anew, computed from the
position and from the prompts that left at each epoch.

Invariants: every epoch contains every prompt that has not left, once; the same (seed, n, shuffle)
and the same leavers produce the same order in any process and after any restart; a leaver changes
no position before the first epoch without it. So the buffer stores only positions and leavers.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class PromptOrder:
    """The endless order of `n` prompts; without `shuffle` every epoch is 0, 1, ..., n - 1."""

    def __init__(self, seed: int, n: int, *, shuffle: bool = True) -> None:
        self._seed = seed
        self._shuffle = shuffle
        # The largest integer stands for "never left", so that a comparison with an epoch needs no
        # special case.
        self._left_epoch = np.full(n, np.iinfo(np.int64).max)
        self._eras: list[tuple[int, int, int]] = [(0, 0, n)]
        """(first position, first epoch, prompts per epoch) of each stretch without leavers."""
        # Only the present epoch's order is kept: 8 bytes a prompt, 80 MB for ten million.
        self._epoch = -1
        self._members: NDArray[np.int64] = np.arange(n)

    @property
    def active(self) -> NDArray[np.int64]:
        """The prompts that have not left, ascending."""
        return np.flatnonzero(self._left_epoch == np.iinfo(np.int64).max)

    def index(self, k: int) -> int:
        """Index of the k-th prompt, k counted from 0 across epochs. The last epoch's order is kept,
        no other.
        """
        epoch, offset = self._locate(k)
        if epoch != self._epoch:
            order = np.arange(len(self._left_epoch))
            if self._shuffle:
                # Shuffle those that left too: a leaver must not change an earlier order.
                order = np.random.default_rng([self._seed, epoch]).permutation(order)
            self._members = order[self._left_epoch[order] > epoch]
            self._epoch = epoch
        return int(self._members[offset])

    def may_lose_at(self, k: int) -> bool:
        """Return whether prompts may be removed at position k: an epoch other than the first starts
        there, and the order after it is not fixed yet.
        """
        return k > self._eras[-1][0] and self._locate(k)[1] == 0

    def remove(self, indices: Sequence[int], k: int) -> None:
        """These prompts are left out from position k on. Raises ValueError where that cannot be, or
        nothing would remain.
        """
        left = len(self.active) - len(indices)
        if not self.may_lose_at(k) or left < 1:
            raise ValueError(
                f"{len(indices)} of {len(self.active)} prompts cannot leave at position {k}"
            )
        epoch, _ = self._locate(k)
        self._left_epoch[list(indices)] = epoch
        self._eras.append((k, epoch, left))
        self._epoch = -1

    def _locate(self, k: int) -> tuple[int, int]:
        """Epoch of position k, and the offset in it."""
        era = bisect.bisect_right(self._eras, k, key=lambda era: era[0]) - 1
        start, epoch, size = self._eras[era]
        ahead, offset = divmod(k - start, size)
        return epoch + ahead, offset
