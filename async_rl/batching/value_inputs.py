"""The numbers that a critic reads next to the hidden state: how far a response is, and how
surprising its tokens were to the policy that sampled them.

The behavior policy gave the log-probs, because its log-probs are known before any pass, and are the
same when the values are computed and when they are trained.
Invariant: the numbers of a token depend on that token and on the tokens that it follows.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from async_rl.core.types import FloatArray, Trajectory

NUM_INPUTS = 4


def place_and_surprise(sample: Trajectory) -> FloatArray:
    """Return 1 for a response token and 0 for a token of the prompt, and the nats of surprise of a
    token that the policy wrote, 0 of any other: float32 [L, 2].
    """
    is_response = np.arange(len(sample.token_ids)) >= sample.prompt_length
    surprise = np.where(sample.loss_mask, -sample.behavior_logprobs, 0.0)
    return np.stack([is_response, surprise], axis=1).astype(np.float32)


def value_inputs(of_tokens: FloatArray, seen: Iterable[npt.NDArray[np.int64]]) -> FloatArray:
    """Return the inputs at each token of a row.

    of_tokens: float32 [T, 2], `place_and_surprise` of each; seen: for each segment, the tokens that
    its last token attends to -> float32 [T, NUM_INPUTS].  With p = exp(-surprise), and over the
    token and those that it follows, the columns are
      the number of response tokens;  1 - p of the token;  the largest 1 - p;  log(1 - sum of log p)
    In a regression they explain as much of the returns as more statistics and the entropy do
    (docs/decisions/critic_inputs.md).
    """
    is_response, surprise = of_tokens.T.astype(np.float64)
    unlikely = -np.expm1(-surprise)
    inputs = np.repeat(unlikely.astype(np.float32)[:, None], NUM_INPUTS, axis=1)
    for path in seen:
        # A token of several paths gets the same numbers from each.
        inputs[path, 0] = is_response[path].cumsum()
        inputs[path, 2] = np.maximum.accumulate(unlikely[path])
        inputs[path, 3] = np.log1p(surprise[path].cumsum())
    return inputs
