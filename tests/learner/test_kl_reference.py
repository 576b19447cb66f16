"""The KL to the reference and the other statistics of a step whose tokens older weights sampled."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from learner_support import make_config
from torch import Tensor

from async_rl.algorithms.logprobs import kl_estimate
from async_rl.algorithms.parts import ALONE
from async_rl.batching.packing import Pass
from async_rl.learner.models import PolicyOutput
from async_rl.learner.objective import Targets
from async_rl.learner.pass_loss import PolicySums, policy_pass_loss

NUM = 100


def test_statistics_count_a_token_as_often_as_the_policy_would_sample_it() -> None:
    """With the weights 1, the end of older weights makes 46 % of each of them instead of 4 %."""
    # What the weights of the sampling, before the step and in it write next, the end first.
    older, proximal = torch.tensor([0.46, 0.34, 0.20]), torch.tensor([0.04, 0.56, 0.40])
    policy = torch.tensor([0.03, 0.77, 0.20])
    # Each token as often as older weights sample it.
    ids = torch.repeat_interleave(torch.arange(3), (NUM * older).round().long())
    sequences = {"sequence_index": torch.arange(NUM), "num_sequences": NUM, "across": ALONE}
    batch: Any = SimpleNamespace(behavior_logprobs=older.log()[ids], **sequences)
    # As if the policy was sure of itself only where older weights wrote the end.
    at_end = (ids == 0).float()
    before = PolicyOutput(proximal.log()[ids], at_end, older.log()[ids], at_end, None)
    empty = torch.zeros(0, dtype=torch.int64)
    fields = ("input_ids", "position_ids", "predict_index", "target_ids", "last_index")
    fields += ("sequences", "segments")
    row = Pass(token_index=torch.arange(NUM), **dict.fromkeys(fields, empty))
    ones = torch.ones(NUM)
    # The end becomes rarer by more than clip_low, the second token more frequent.
    advantages = torch.where(ids == 1, ones, -ones)
    _, sums = policy_pass_loss(
        make_config("grpo_code").algorithm,
        batch,
        row,
        PolicyOutput(policy.log()[ids], at_end, None, None, None),
        weights=ones,
        before=before,
        targets=Targets(raw_advantages=ones, advantages=advantages, returns=None),
        corrected=None,
        kl_coef=0.0,
    )
    found = PolicySums(*sums.tolist())
    assert found.tokens == pytest.approx(NUM)
    assert found.clipped_low / found.tokens == pytest.approx(0.04 + 0.40)
    assert found.clipped_high / found.tokens == pytest.approx(0.56)
    moved = (proximal * (proximal / policy).log()).sum()
    assert found.kl_proximal_policy / found.tokens == pytest.approx(float(moved), rel=1e-5)


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


def test_the_tangent_bounds_the_share_of_one_token_as_the_documents_say() -> None:
    logits, reference, ids = recorded_step()
    logits.requires_grad_()
    own, ref = (x.log_softmax(-1).gather(1, ids)[:, 0] for x in (logits, reference))
    published = (ref - own).expm1() - (ref - own)
    for kl, mean, share in (
        (published, 0.330, 0.533),
        (kl_estimate(own, ref_logprobs=ref, estimator="k3"), 0.0804, 0.0186),
    ):
        (gradient,) = torch.autograd.grad(kl.sum(), logits, retain_graph=True)
        lengths = gradient.norm(dim=1)
        assert float(kl.detach().mean()) == pytest.approx(mean, abs=5e-4)
        assert float(lengths[0] / lengths.sum()) == pytest.approx(share, abs=5e-4)
