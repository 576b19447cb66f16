"""The logits of a model: their product in float32, and their changes by what could be drawn."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from async_rl.core.frozen import frozen

EXCLUDED = -1e30
"""The logit of a token that cannot be drawn. With -inf, entropy and KL would be 0 times infinity.
"""


def product(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return a b in float32: rounded to bfloat16, logits would move log-probs by 0.01 nats.

    a: float32 or bfloat16 [R, H]; b: the same dtype [H, V] -> float32 [R, V].  Raises RuntimeError
    (by torch) for bfloat16 on a CPU.
    """
    if a.dtype is torch.float32:
        return torch.mm(a, b, out=out)
    return torch.mm(a, b, out_dtype=torch.float32, out=out)


@frozen
class Edits:
    """The changes of the logits at N positions, as a table of U different ones.

    index: int64 [N], the change of each position; 0 = none.  Change u excludes all tokens but its
    ids if is_closed[u] (bool [U]), and adds values to the logits of its ids, after the temperature:
    starts[u] : starts[u + 1] of ids (int32 [M]) and values (float32 [M]); starts: int64 [U + 1].
    """

    index: Tensor
    is_closed: Tensor
    starts: Tensor
    ids: Tensor
    values: Tensor

    def at(self, index: Tensor) -> Edits:
        """Return the changes at some of the positions: int64 or bool [K]."""
        return replace(self, index=self.index[index])

    def apply(self, logits: Tensor, rows: slice) -> None:
        """Change the logits of some positions in place: float32 [rows, V], after the temperature.
        An excluded token gets -1e30.
        """
        index = self.index[rows]
        sizes = self.starts[index + 1] - self.starts[index]
        row = torch.repeat_interleave(sizes)
        first = self.starts[index] - (sizes.cumsum(0) - sizes)
        cells = torch.arange(len(row), device=row.device) + first[row]
        ids = self.ids[cells].long()
        changed = logits[row, ids] + self.values[cells]
        logits.masked_fill_(self.is_closed[index, None], EXCLUDED)
        logits[row, ids] = changed
