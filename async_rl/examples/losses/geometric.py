"""The veto by the geometric mean: a sequence is masked if its mean weight per token is out of
bounds.

Start it with `async-rl launch conf=grpo_code algorithm=geometric`.
"""

from torch import Tensor

from async_rl.algorithms.losses import BehaviorWeights, behavior_weights
from async_rl.algorithms.parts import Parts

# The cap of algorithm.policy_loss.correction=sequence_tis.
CAP = 2.0
# The bounds on the geometric mean, a factor of 1.5 to both sides. docs/algorithms.md has the bias
# of the gradient with these bounds.
MAXIMUM = 1.5
MINIMUM = 0.67


def weights(log_ratio: Tensor, *, sequences: Parts) -> BehaviorWeights:
    """Return the weights of the R tokens of a batch; `async_rl/plugins.py` has the arguments.

    The weight is that of `sequence_tis`, or 0 in a sequence that `geometric_outliers` returns.
    """
    corrected = behavior_weights(
        log_ratio, sequences=sequences, correction="sequence_tis", maximum=CAP, minimum=0.0
    )
    is_outlier = geometric_outliers(
        log_ratio, sequences=sequences, maximum=MAXIMUM, minimum=MINIMUM
    )
    weights = corrected.weights.masked_fill(is_outlier, 0.0)
    return BehaviorWeights(weights, corrected.raw, corrected.is_bounded | is_outlier)


def geometric_outliers(
    log_ratio: Tensor, *, sequences: Parts, maximum: float, minimum: float
) -> Tensor:
    """Return the tokens of sequences whose geometric mean weight is out of bounds.

    log_ratio: float32 [R], proximal - behavior log-probs -> bool [R].  The geometric mean weight is
    exp(mean of log_ratio over the trained tokens); maximum, minimum: its bounds, infinity and 0 for
    none.  Unlike the product of the weights it does not grow with the length of the sequence (the
    sequence ratio of GSPO, arXiv 2507.18071 eq. 7, between proximal and behavior policy).
    """
    mean = sequences.mean(log_ratio.detach()).exp()
    return (mean > maximum) | (mean < minimum)
