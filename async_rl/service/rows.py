"""Checked datums, and rows of them for the learner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from async_rl.batching.packing import Pass
from async_rl.core.frozen import frozen

AnyArray = npt.NDArray[Any]


@frozen
class Example:
    """A checked datum: tokens int64 [N]; targets int64 and inputs float32, [N] or [N, K]."""

    index: int
    tokens: AnyArray
    targets: AnyArray
    inputs: Mapping[str, AnyArray]


@frozen
class Row:
    """Examples packed into one row, with R positions.

    packed: predicts the U different pairs of a position and its targets, int64 [U] or [U, K], which
    are its target_ids; pair: int64 [R], that of each position.
    """

    examples: Sequence[Example]
    packed: Pass
    pair: Tensor

    @property
    def lengths(self) -> list[int]:
        """The tokens of each example."""
        return [len(example.tokens) for example in self.examples]

    def input(self, field: str) -> Tensor:
        """Return an input of all examples: float32 [R] or [R, K]."""
        values = np.concatenate([example.inputs[field] for example in self.examples])
        return torch.as_tensor(values, device=self.pair.device)
