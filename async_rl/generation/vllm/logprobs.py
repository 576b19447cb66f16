"""The tokens of a sample and the likeliest ones at their positions, with their log-probs.

Written against vLLM 0.32.
"""

import numpy as np
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput

from async_rl.core.errors import Unavailable
from async_rl.core.types import FloatArray, IntArray
from async_rl.protocol.generator import Completion, Scores


class WrittenLogprobs:
    """The log-probs of all tokens of one output, without alternatives."""

    def __init__(self, values: FloatArray) -> None:
        self.values = values

    def __radd__(self, cumulative_logprob: float) -> float:
        """vLLM adds every entry to a sum that this project does not read."""
        return cumulative_logprob


def completion_of(
    sample: CompletionOutput, scores: Scores, versions: IntArray, num_top: int
) -> Completion:
    """Return a finished sample. scores: of its tokens and of the likeliest ones, of which it has
    num_top. Raises Unavailable if it was ended early.
    """
    # An aborted sample has too few tokens, and would be trained as if the policy had finished it.
    if sample.finish_reason not in ("stop", "length"):
        raise Unavailable(f"vLLM ended sample {sample.index} early ({sample.finish_reason})")
    top = slice(1, 1 + num_top)
    return Completion(
        index=sample.index,
        token_ids=np.array(sample.token_ids, np.int32),
        logprobs=scores.logprobs[:, 0],
        versions=versions,
        is_truncated=sample.finish_reason == "length",
        likeliest=Scores(ids=scores.ids[:, top], logprobs=scores.logprobs[:, top])
        if num_top
        else None,
    )


def scores_of(sample: CompletionOutput, num_top: int) -> Scores:
    """Return the N tokens of a sample and the likeliest ones at their positions, [N, 1 + num_top].

    The entries come from `ThreadedCore`, or from vLLM's own core with 1 + num_top per token.
    """
    entries = sample.logprobs.logprobs
    if entries and isinstance(entries[0], WrittenLogprobs):
        values = np.concatenate([entry.values for entry in entries])
        return Scores(ids=np.array(sample.token_ids, np.int32)[:, None], logprobs=values[:, None])
    return _columns(sample.logprobs, num_top)


def prompt_scores(output: RequestOutput, num_top: int | None) -> Scores:
    """Return the log-probs of a prompt: [P, 1 + num_top], as in `Sampled`; None = [P, 0]."""
    shape = (len(output.prompt_token_ids or ()), 0 if num_top is None else num_top + 1)
    scores = Scores(ids=np.zeros(shape, np.int32), logprobs=np.full(shape, np.nan, np.float32))
    if num_top is not None and isinstance(output.prompt_logprobs, FlatLogprobs):
        found = _columns(output.prompt_logprobs, num_top)
        # The first token has no entry.
        scores.ids[1:] = found.ids
        scores.logprobs[1:] = found.logprobs
    return scores


def _columns(flat: FlatLogprobs, num_top: int) -> Scores:
    shape = (-1, 1 + num_top)
    return Scores(
        ids=np.array(flat.token_ids, np.int32).reshape(shape),
        logprobs=np.array(flat.logprobs, np.float32).reshape(shape),
    )
