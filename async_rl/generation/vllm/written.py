"""Tokens that a request has written since its last output, and their log-probs in one piece.

vLLM's front end handles log-prob entries one by one, at 10 us each. So all log-probs of an output
travel through it as one entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from vllm.v1.outputs import LogprobsLists

from async_rl.core.types import FloatArray

_ONE_ENTRY = np.zeros((1, 1), np.int64)


@dataclass(slots=True)
class Unsent:
    """Tokens of a request that are not in an output yet."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobsLists] = field(default_factory=list)

    def merged_logprobs(self) -> LogprobsLists | None:
        """The log-probs of all tokens as one entry."""
        if not self.logprobs:
            return None
        # Column 0 is the sampled token.
        values = np.concatenate([lists.logprobs[:, 0] for lists in self.logprobs])
        entry = np.empty((1, 1), object)
        entry[0, 0] = WrittenLogprobs(values)
        return LogprobsLists(_ONE_ENTRY, entry, _ONE_ENTRY[0])


class WrittenLogprobs:
    """The log-probs of all tokens of one output."""

    def __init__(self, values: FloatArray) -> None:
        self.values = values

    def __radd__(self, cumulative_logprob: float) -> float:
        """vLLM adds every entry to a sum that this project does not read."""
        return cumulative_logprob


def written_logprobs(entries: Sequence[WrittenLogprobs | float]) -> FloatArray:
    """Return float32 [number of tokens] from the entries of one sample.

    The entries come from `ThreadedCore`, or from vLLM's own core with one per token.
    """
    if entries and isinstance(entries[0], WrittenLogprobs):
        return np.concatenate([e.values for e in entries if isinstance(e, WrittenLogprobs)])
    return np.array(entries, np.float32)
