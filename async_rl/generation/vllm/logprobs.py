"""The log-probs of a sample's tokens, and the tokens that top-k and top-p left.

Written against vLLM 0.32.
"""

import numpy as np
from vllm.logprobs import FlatLogprobs

from async_rl.core.types import FloatArray, IntArray

ALTERNATIVES = "alternatives"
"""The extra argument of a request whose caller reads alternatives of its tokens."""


class WrittenLogprobs:
    """The log-probs of all tokens of one output; kept: as in `kept_tokens`, if it is recorded."""

    def __init__(self, values: FloatArray, kept: list[IntArray]) -> None:
        self.values = values
        self.kept = kept

    def __radd__(self, cumulative_logprob: float) -> float:
        """vLLM adds every entry to a sum that this project does not read."""
        return cumulative_logprob


def logprobs_of(flat: FlatLogprobs, num_top: int = 0) -> tuple[FloatArray, list[IntArray]]:
    """Return the log-probs of the N tokens of one sample, float32 [N], and the tokens that were
    kept at each of them, if num_top > 0.

    The entries come from `ThreadedCore`, or from vLLM's own core with 1 + num_top per token.
    """
    entries = flat.logprobs
    if entries and isinstance(entries[0], WrittenLogprobs):
        values = np.concatenate([entry.values for entry in entries])
        return values, [kept for entry in entries for kept in entry.kept]
    logprobs, ids = columns_of(flat, num_top)
    return logprobs[:, 0], kept_tokens(logprobs, ids) if num_top else []


def columns_of(flat: FlatLogprobs, num_top: int) -> tuple[FloatArray, IntArray]:
    """Return the log-probs and the ids of N tokens and of the likeliest ones at their positions:
    float32 and int32 [N, 1 + num_top].
    """
    logprobs = np.array(flat.logprobs, np.float32).reshape(-1, 1 + num_top)
    return logprobs, np.array(flat.token_ids, np.int32).reshape(-1, 1 + num_top)


def kept_tokens(logprobs: FloatArray, token_ids: IntArray) -> list[IntArray]:
    """Return the tokens with a probability above 0 at each position, ascending.

    logprobs, token_ids: [N, 1 + K] of the drawn token and of the K likeliest ones.
    """
    rows = zip(logprobs, token_ids, strict=True)
    return [np.unique(ids[row > -np.inf]) for row, ids in rows]
