"""Which forms of the KL pull a policy back to its reference.

The policy is a table of logits, so expected gradients are exact sums over the vocabulary. The
choices of the configuration follow from them: an estimate in the reward is k1, one in the loss is
any but k1.
"""

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor

from async_rl.algorithms.logprobs import KLEstimator, kl_estimate

ESTIMATORS: tuple[KLEstimator, ...] = get_args(KLEstimator)


def test_only_k1_in_the_reward_and_all_others_in_the_loss_have_the_gradient_of_a_distance() -> None:
    """In the loss k2 has that of KL(policy, reference), k3 of KL(reference, policy), abs of the
    difference of the probabilities, and k1 none. The gradient of an expected reward lacks the term
    of the reward's own dependence on the policy: only of k1 that term is 0.
    """
    random = torch.Generator().manual_seed(4)
    reference = torch.randn(6, 8, generator=random, dtype=torch.float64).log_softmax(-1)
    noise = torch.randn(6, 8, generator=random, dtype=torch.float64)
    logits = (reference + 0.4 * noise).requires_grad_()
    p, q = logits.log_softmax(-1).exp(), reference.exp()

    def gradient(of: Callable[[Tensor], Tensor]) -> Tensor:
        (found,) = torch.autograd.grad(of(logits.log_softmax(-1)).sum(), logits)
        return found

    def estimate(logp: Tensor, estimator: KLEstimator) -> Tensor:
        return kl_estimate(logp, ref_logprobs=reference, estimator=estimator)

    forward = gradient(lambda logp: logp.exp() * (logp - reference))
    in_loss = {
        name: gradient(lambda logp, name=name: p.detach() * estimate(logp, name))
        for name in ESTIMATORS
    }
    torch.testing.assert_close(in_loss["k2"], forward)
    reverse = gradient(lambda logp: q * (reference - logp))
    torch.testing.assert_close(in_loss["k3"], reverse)
    torch.testing.assert_close(in_loss["abs"], gradient(lambda logp: (logp.exp() - q).abs()))
    assert float(in_loss["k1"].abs().max()) < 1e-7
    assert float((forward - reverse).abs().max()) > 1e-3
    for name in ESTIMATORS:
        in_reward = gradient(lambda logp, name=name: (p * estimate(logp, name)).detach() * logp)
        assert torch.allclose(in_reward, forward) == (name == "k1"), name


@pytest.mark.covers("kl_penalty")
@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", -0.5), ("abs", 0.5), ("k2", 0.125), ("k3", 0.14872)]
)
def test_kl_estimators_by_hand(estimator: KLEstimator, expected: float) -> None:
    policy, reference = torch.tensor([-1.5]), torch.tensor([-1.0])
    found = kl_estimate(policy, ref_logprobs=reference, estimator=estimator)
    assert found.item() == pytest.approx(expected, rel=1e-4)
