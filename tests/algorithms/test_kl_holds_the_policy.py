"""The KL alone, without a task: which forms of it pull a policy back to its reference.

The policy is a table of logits per position, so its KL to the reference is known exactly. The
choices of the configuration follow from these facts: an estimate in the reward is k1, one in the
loss is any but k1.
"""

from __future__ import annotations

from typing import Literal, get_args

import pytest
import torch
from torch import Tensor

from async_rl.algorithms.advantages import returns_to_go
from async_rl.algorithms.logprobs import KLEstimator, kl_estimate

LENGTH, VOCABULARY, NUM_SAMPLES, NUM_STEPS = 6, 8, 256, 60
Estimator = KLEstimator | Literal["full"]


class Table:
    """Logits [L, V] of a policy that begins near a random reference."""

    def __init__(self) -> None:
        self._random = torch.Generator().manual_seed(4)
        self.reference = torch.randn(LENGTH, VOCABULARY, generator=self._random).log_softmax(-1)
        noise = torch.randn(LENGTH, VOCABULARY, generator=self._random)
        self.logits = (self.reference + 0.4 * noise).requires_grad_()

    def exact_kl(self) -> Tensor:
        """The exact KL at each position: [L]."""
        logp = self.logits.log_softmax(-1)
        return (logp.exp() * (logp - self.reference)).sum(-1)

    def step(self, estimator: Estimator, *, is_in_reward: bool) -> None:
        """One step on fresh samples whose task reward is 0."""
        logp = self.logits.log_softmax(-1)
        probs = logp.detach().exp()
        tokens = torch.multinomial(probs, NUM_SAMPLES, replacement=True, generator=self._random).T
        chosen, ref = (x.gather(1, tokens.T).T for x in (logp, self.reference))
        if estimator == "full":
            kl = self.exact_kl().expand(NUM_SAMPLES, -1)
        else:
            kl = kl_estimate(chosen, ref_logprobs=ref, estimator=estimator)
        loss = kl.sum(1).mean()
        if is_in_reward:
            mask = torch.ones_like(tokens, dtype=torch.bool)
            returns = returns_to_go(-kl.detach(), mask=mask, gamma=1.0)
            loss = -(returns * chosen).sum(1).mean()
        self.logits.grad = None
        loss.backward()
        assert self.logits.grad is not None
        with torch.no_grad():
            self.logits -= 0.3 * self.logits.grad


def share_left(estimator: Estimator, *, is_in_reward: bool) -> float:
    """The KL after the steps over the KL before them."""
    table = Table()
    before = float(table.exact_kl().detach().sum())
    for _ in range(NUM_STEPS):
        table.step(estimator, is_in_reward=is_in_reward)
    return float(table.exact_kl().detach().sum()) / before


@pytest.mark.parametrize("estimator", [*get_args(KLEstimator), "full"])
def test_only_k1_in_the_reward_and_all_others_in_the_loss_hold_the_policy_to_the_reference(
    estimator: Estimator,
) -> None:
    """The gradient of an expected reward has no term of the reward's own dependence on the policy.
    Only of k1 that term is 0; of the others it is what pulls back.
    """
    for is_in_reward in (True, False):
        left = share_left(estimator, is_in_reward=is_in_reward)
        assert left < 0.5 if (estimator == "k1") == is_in_reward else left > 0.9


def test_expected_gradients_in_the_loss_are_those_of_the_kl_in_either_direction() -> None:
    """Exactly, by the sum over the vocabulary: k2 and full of KL(policy, reference), k3 of
    KL(reference, policy), k1 none.
    """
    table = Table()
    logp, logq = table.logits.double().log_softmax(-1), table.reference.double()

    def gradient(loss: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(loss, table.logits, retain_graph=True)
        return found

    def expected(estimator: KLEstimator) -> Tensor:
        estimates = kl_estimate(logp, ref_logprobs=logq, estimator=estimator)
        return gradient((logp.detach().exp() * estimates).sum())

    forward = gradient((logp.exp() * (logp - logq)).sum())
    reverse = gradient((logq.exp() * (logq - logp)).sum())
    torch.testing.assert_close(expected("k2"), forward)
    torch.testing.assert_close(expected("k3"), reverse)
    difference = (logp.exp() - logq.exp()).abs().sum()
    torch.testing.assert_close(expected("abs"), gradient(difference))
    assert float(expected("k1").abs().max()) < 1e-7
    assert float((forward - reverse).abs().max()) > 1e-3
