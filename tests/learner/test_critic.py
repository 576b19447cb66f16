"""A critic on the policy's backbone. What values depend on is that of the oracle of whole steps."""

from pathlib import Path

import pytest
import torch
from learner_support import equal, make_groups, make_trainer, policy_of, weights_of

from async_rl.batching.batch import collate_part, whole
from async_rl.batching.packing import pack

CPU = torch.device("cpu")
SHARED = "algorithm.advantage.critic=shared"


@pytest.mark.proves("algorithm.advantage.critic.warmup_steps")
def test_during_the_warm_up_only_the_head_on_a_shared_backbone_learns(model_path: Path) -> None:
    knobs = ("warmup_steps=10", "lr=1e-1")
    knobs = (SHARED, *(f"algorithm.advantage.critic.{knob}" for knob in knobs))
    trainer = make_trainer(model_path, "ppo_code", *knobs)
    before, groups = weights_of(trainer), make_groups()
    found = [trainer.step(groups, 0).scalars for _ in range(10)]
    assert found[-1]["value/loss"] < 0.9 * found[0]["value/loss"]
    for version in (9, 10):
        assert equal(before, weights_of(trainer))
        trainer.step(make_groups(version=version), version)
    assert not equal(before, weights_of(trainer))


def test_a_rank_without_sequences_takes_part_in_the_gradient_of_a_shared_head(
    model_path: Path,
) -> None:
    policy = policy_of(make_trainer(model_path, "ppo_code", SHARED))
    idle = pack(collate_part(whole(make_groups()), device=CPU), [], device=CPU)
    policy(idle, temperature=1.0, chunk_tokens=16).values.at_tokens.sum().backward()
    assert policy.value_head is not None
    gradients = [p.grad for p in policy.value_head.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)
