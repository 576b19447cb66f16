"""The KL to the reference and the other statistics of a step whose tokens older weights sampled."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from learner_support import make_config
from torch import Tensor

from async_rl.algorithms.logprobs import KLEstimator, kl_estimate, token_logprobs
from async_rl.algorithms.parts import ALONE
from async_rl.batching.packing import Pass
from async_rl.learner import metrics
from async_rl.learner.models import PolicyOutput
from async_rl.learner.objective import Targets
from async_rl.learner.pass_loss import PolicySums, policy_pass_loss

OLDER = torch.tensor([0.46, 0.34, 0.20])
"""What the weights that sampled write next, the end first; it is what the reference writes."""
PROXIMAL = torch.tensor([0.04, 0.56, 0.40])
POLICY = torch.tensor([0.03, 0.77, 0.20])
NUM = 100


def tokens_of_older_weights() -> tuple[SimpleNamespace, PolicyOutput, Tensor]:
    """Each token as often as older weights sample it in NUM cases: batch, outputs, token ids."""
    ids = torch.repeat_interleave(torch.arange(3), (NUM * OLDER).round().long())
    batch = SimpleNamespace(
        behavior_logprobs=OLDER.log()[ids],
        sequence_index=torch.arange(NUM),
        num_sequences=NUM,
        across=ALONE,
    )
    before = PolicyOutput(
        logprobs=PROXIMAL.log()[ids],
        # As if the policy was sure of itself only where older weights wrote the end.
        entropies=(ids == 0).float(),
        ref_logprobs=OLDER.log()[ids],
        kl=(ids == 0).float(),
        values=None,
    )
    return batch, before, ids


def test_statistics_count_a_token_as_often_as_the_policy_would_sample_it() -> None:
    """With the weights 1, the end of older weights makes 46 % of each of them instead of 4 %."""
    batch, before, ids = tokens_of_older_weights()
    empty = torch.zeros(0, dtype=torch.int64)
    row = Pass(
        input_ids=empty,
        position_ids=empty,
        predict_index=empty,
        target_ids=empty,
        token_index=torch.arange(NUM),
        last_index=empty,
        sequences=empty,
        segments=empty,
    )
    ones = torch.ones(NUM)
    _, sums = policy_pass_loss(
        make_config("grpo_code").algorithm,
        batch,  # type: ignore[arg-type]
        row,
        PolicyOutput(POLICY.log()[ids], before.entropies, None, None, None),
        weights=ones,
        before=before,
        # The end becomes rarer by more than clip_low, the second token more frequent.
        targets=Targets(
            raw_advantages=ones, advantages=torch.where(ids == 1, ones, -ones), returns=None
        ),
        corrected=None,
        kl_coef=0.0,
    )
    found = PolicySums(*sums.tolist())
    assert found.tokens == pytest.approx(NUM)
    assert found.clipped_low / found.tokens == pytest.approx(0.04 + 0.40)
    assert found.clipped_high / found.tokens == pytest.approx(0.56)
    moved = (PROXIMAL * (PROXIMAL / POLICY).log()).sum()
    assert found.kl_proximal_policy / found.tokens == pytest.approx(float(moved), rel=1e-5)
    step = SimpleNamespace(mask=ones > 0, before=before, batch=batch)
    # Of the exact KL too, which has the same values here.
    assert metrics._counted_mean(step, before.entropies) == pytest.approx(0.04)  # type: ignore[arg-type]


def recorded_step() -> tuple[Tensor, Tensor, Tensor]:
    """Logits of policy and reference [R, V] and tokens of a step like one of a run with ppo_code:
    4,200 tokens, an exact KL of 0.06, and one end at 4e-4 that the reference gives 0.46.
    """
    random = torch.Generator().manual_seed(82)
    logits = 2 * torch.randn(4200, 64, generator=random)
    reference = logits + 0.37 * torch.randn(4200, 64, generator=random)
    ids = torch.multinomial(logits.softmax(-1), 1, generator=random)
    for table, share in ((logits, 4e-4), (reference, 0.46)):
        rest = table[0, 1:].logsumexp(0)
        table[0, 0] = rest + math.log(share / (1 - share))
    ids[0] = 0
    return logits, reference, ids


Penalty = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_tokens(estimate: Callable[[Tensor, Tensor], Tensor]) -> Penalty:
    def penalty(logits: Tensor, reference: Tensor, ids: Tensor) -> Tensor:
        return estimate(*(x.log_softmax(-1).gather(1, ids)[:, 0] for x in (logits, reference)))

    return penalty


def exact(logits: Tensor, reference: Tensor, ids: Tensor) -> Tensor:
    head = torch.eye(64)
    _, _, kl, _ = token_logprobs(
        logits,
        head=head,
        targets=ids[:, 0],
        temperature=1.0,
        chunk_tokens=10_000,
        reference=(reference, head),
    )
    assert kl is not None
    return kl


def product(estimator: KLEstimator) -> Penalty:
    return by_tokens(lambda own, ref: kl_estimate(own, ref_logprobs=ref, estimator=estimator))


@pytest.mark.parametrize(
    ("penalty", "mean", "of_value", "of_gradient"),
    [
        # k3 as published: the estimate is six times the KL, and one token is most of it.
        (by_tokens(lambda own, ref: (ref - own).expm1() - (ref - own)), 0.330, 0.824, 0.533),
        (product("k3"), 0.0804, 0.276, 0.0186),
        (product("k2"), 0.0664, 0.0891, 0.0068),
        (product("abs"), 0.271, 0.0062, 0.0003),
        # As it is in the reward, where the length of the gradient is that of the reward.
        (product("k1"), 0.0572, 0.0062, 0.0003),
        # What policy/kl_reference reports, whatever the penalty.
        (exact, 0.0575, 0.0027, 0.0002),
    ],
    ids=["k3 as published", "k3", "k2", "abs", "k1", "exact"],
)
def test_no_penalty_is_that_of_one_token(
    penalty: Penalty, mean: float, of_value: float, of_gradient: float
) -> None:
    logits, reference, ids = recorded_step()
    kl = penalty(logits.requires_grad_(), reference, ids)
    (gradient,) = torch.autograd.grad(kl.sum(), logits)
    lengths = gradient.norm(dim=1)
    kl = kl.detach()
    found = (kl.mean(), kl[0].abs() / kl.abs().sum(), lengths[0] / lengths.sum())
    assert [float(x) for x in found] == pytest.approx([mean, of_value, of_gradient], abs=5e-4)
