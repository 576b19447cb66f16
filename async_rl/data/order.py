"""Which prompt comes k-th: epochs over all prompts, each shuffled anew, computed from k alone.

Invariants: every epoch holds every prompt once; the same (seed, n, shuffle) gives the same order in any process and after any restart.
Used by the buffer, which stores nothing but k.
"""

from __future__ import annotations

import numpy as np


class PromptOrder:
    """The endless order of `n` prompts; without `shuffle` every epoch is 0, 1, ..., n - 1."""

    def __init__(self, seed: int, n: int, *, shuffle: bool = True) -> None:
        if n < 1:
            raise ValueError(f"n={n}: an order needs at least one prompt")
        self._seed = seed
        self._n = n
        self._shuffle = shuffle
        self._epoch = -1
        self._permutation: np.ndarray[tuple[int], np.dtype[np.int64]] = np.arange(n)

    def index(self, k: int) -> int:
        """Index of the k-th prompt, k counted from 0 across epochs. The last epoch's permutation is kept, nothing else."""
        if k < 0:
            raise ValueError(f"k={k} is negative")
        epoch, place = divmod(k, self._n)
        if not self._shuffle:
            return place
        if epoch != self._epoch:
            self._permutation = np.random.default_rng([self._seed, epoch]).permutation(self._n)
            self._epoch = epoch
        return int(self._permutation[place])
