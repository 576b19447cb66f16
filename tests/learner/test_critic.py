"""A critic: what its values depend on, its checkpoints, and one on the policy's backbone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from learner_support import as_trees, make_groups, make_trainer, paths_of
from torch import Tensor

from async_rl.batching.batch import collate_part, whole
from async_rl.batching.packing import Pass, pack
from async_rl.core.types import Group, Trajectory
from async_rl.learner.models import Critic, Policy, ValueHead, Values
from async_rl.learner.trainer import Trainer


def policy_of(trainer: Trainer) -> list[Tensor]:
    return [t.clone() for t in trainer.full_tensors()]


CPU = torch.device("cpu")


def critic_of(trainer: Trainer) -> Critic | Policy:
    models = trainer._models
    return models.critic or models.policy


def head_of(critic: Critic | Policy) -> ValueHead:
    head = critic.head if isinstance(critic, Critic) else critic.value_head
    assert head is not None
    return head


def values_of(critic: Critic | Policy, row: Pass) -> Values:
    if isinstance(critic, Critic):
        return critic(row)
    return critic(row, temperature=1.0, chunk_tokens=16).values


WARMING = (
    "algorithm.advantage.critic=shared",
    "algorithm.advantage.critic.warmup_steps=10",
    "algorithm.advantage.critic.lr=1e-1",
    "learner.optimizer.warmup_steps=0",
)


@pytest.mark.proves("algorithm.advantage.critic.warmup_steps")
def test_during_the_warm_up_only_the_head_on_a_shared_backbone_learns(model_path: Path) -> None:
    trainer = make_trainer(model_path, "ppo_code", *WARMING)
    before, groups = policy_of(trainer), make_groups()
    found = [trainer.step(groups, 0).scalars for _ in range(10)]
    assert found[-1]["value/loss"] < 0.9 * found[0]["value/loss"]
    assert all(torch.equal(a, b) for a, b in zip(before, policy_of(trainer), strict=True))
    trainer.step(make_groups(version=9), 9)
    assert all(torch.equal(a, b) for a, b in zip(before, policy_of(trainer), strict=True))
    trainer.step(make_groups(version=10), 10)
    assert not all(torch.equal(a, b) for a, b in zip(before, policy_of(trainer), strict=True))


def test_a_rank_without_sequences_takes_part_in_the_gradient_of_a_shared_head(
    model_path: Path,
) -> None:
    policy = critic_of(make_trainer(model_path, "ppo_code", "algorithm.advantage.critic=shared"))
    idle = pack(collate_part(whole(make_groups()), device=CPU), [], device=CPU)
    values_of(policy, idle).at_tokens.sum().backward()
    gradients = [p.grad for p in head_of(policy).parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_a_value_depends_on_the_tokens_that_its_token_follows_and_on_no_other(
    model_path: Path, kind: str
) -> None:
    """Another token, or another probability of it, changes the values after it on its branch."""
    critic = critic_of(make_trainer(model_path, "ppo_code", f"algorithm.advantage.critic={kind}"))
    with torch.no_grad():
        for parameter in head_of(critic).parameters():
            parameter.normal_()

    def values(group: Group, sample: Trajectory) -> tuple[Tensor, Tensor]:
        group = msgspec.structs.replace(group, trajectories=[*group.trajectories, sample])
        row = pack(collate_part(whole([group]), device=CPU), range(5), device=CPU)
        with torch.no_grad():
            found = values_of(critic, row)
        return found.at_tokens[-sample.response_length :], found.after_end[-1]

    for group in as_trees(make_groups(num_groups=1), np.random.default_rng(4), least_parent=0):
        sample = max(group.trajectories, key=lambda t: t.response_length)
        paths, parents = paths_of(sample), dict(sample.branches)
        followed = [parents.get(i, i - 1) for i in range(sample.prompt_length, len(paths))]
        before, end_before = values(group, sample)
        for changed in np.flatnonzero(sample.loss_mask):
            ids, logprobs = sample.token_ids.copy(), sample.behavior_logprobs.copy()
            ids[changed] = (ids[changed] + 1) % 50
            logprobs[changed] -= 0.5
            for other in ({}, {"token_ids": ids}):
                now, end_now = values(
                    group, msgspec.structs.replace(sample, behavior_logprobs=logprobs, **other)
                )
                assert ((now - before).abs() > 1e-5).tolist() == [
                    changed in paths[at] for at in followed
                ]
                assert bool((end_now - end_before).abs() > 1e-5) is (changed in paths[-1])
