"""Random tokens of sequences, and two ranks that share them, for the tests of off-policy losses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from async_rl.algorithms.parts import Across, Parts

TOKENS = 24
T = TypeVar("T")


class Case:
    """Random tokens of four sequences in two batches; some are not trained."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.index = rng.integers(0, 4, TOKENS)
        self.mask = rng.random(TOKENS) < 0.8
        self.log_ratio = torch.tensor(rng.normal(size=TOKENS) * 0.7)
        self.logprobs = torch.tensor(-rng.uniform(0.05, 3, TOKENS), requires_grad=True)
        self.advantages = torch.tensor(rng.normal(size=4))[self.index]
        self.sequences = Parts(
            index=torch.tensor(self.index), count=4, mask=torch.tensor(self.mask)
        )

    def members(self, token: int) -> list[int]:
        """The trained tokens of the token's sequence."""
        return [i for i in range(TOKENS) if self.index[i] == self.index[token] and self.mask[i]]


def over_two_ranks(case: Case, compute: Callable[[Tensor, Parts], T]) -> list[T]:
    """The results of two ranks, each with half of the tokens."""
    barrier, slots, halves = threading.Barrier(2), [torch.zeros(0)] * 2, (0, TOKENS // 2, TOKENS)

    def rank(number: int) -> T:
        def exchange(x: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
            slots[number] = x
            barrier.wait(10)
            combined = combine(*slots)
            barrier.wait(10)
            return combined

        across = Across()
        across.sum = lambda x: exchange(x, torch.add)
        across.maximum = lambda x: exchange(x, torch.maximum)
        own = slice(halves[number], halves[number + 1])
        parts = Parts(
            index=case.sequences.index[own], count=4, mask=case.sequences.mask[own], across=across
        )
        return compute(case.log_ratio[own], parts)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, range(2)))
