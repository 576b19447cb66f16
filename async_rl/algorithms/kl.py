"""Estimators of KL(policy, reference) from the log-probs of sampled tokens (http://joschu.net/blog/kl-approx.html).

Called by the learner for the KL in the reward, the KL in the loss, and for diagnostics.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

KLEstimator = Literal["k1", "abs", "k2", "k3"]


def kl_estimate(policy_logprobs: Tensor, *, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(policy, reference) at each token, for tokens sampled from the policy.

    policy_logprobs, ref_logprobs: float32 [...] -> float32 [...].  With d = policy - ref:
      k1   d                 unbiased, may be negative; as a loss its expected gradient is 0, so it belongs in the reward
      abs  |d|
      k2   d^2 / 2           its gradient is that of the KL
      k3   exp(-d) - 1 + d   unbiased, never negative
    """
    d = policy_logprobs - ref_logprobs
    if estimator == "k1":
        return d
    if estimator == "abs":
        return d.abs()
    if estimator == "k2":
        return 0.5 * d.square()
    return (-d).expm1() + d
