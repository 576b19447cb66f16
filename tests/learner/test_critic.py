"""A critic on the policy's backbone: its warm-up, its checkpoint, and ranks without sequences."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from learner_support import make_groups, make_trainer
from torch import Tensor
from transformers import AutoModelForCausalLM

from async_rl.batching.batch import collate
from async_rl.batching.packing import pack
from async_rl.learner.sharding import full_tensor
from async_rl.learner.trainer import Trainer


def policy_of(trainer: Trainer) -> list[Tensor]:
    return [t.clone() for t in trainer.full_tensors()]


WARMING = (
    "algorithm.advantage.critic=shared",
    "algorithm.advantage.critic.warmup_steps=30",
    "algorithm.advantage.critic.lr=1e-1",
    "learner.optimizer.warmup_steps=0",
)


@pytest.mark.proves("algorithm.advantage.critic.warmup_steps")
def test_during_the_warm_up_only_the_head_on_a_shared_backbone_learns(model_path: Path) -> None:
    trainer = make_trainer(model_path, "ppo_code", *WARMING)
    before, groups = policy_of(trainer), make_groups()
    found = [trainer.step(groups, 0).scalars for _ in range(30)]
    assert found[-1]["value/loss"] < 0.9 * found[0]["value/loss"]
    assert all(torch.equal(a, b) for a, b in zip(before, policy_of(trainer), strict=True))
    trainer.step(make_groups(version=29), 29)
    assert all(torch.equal(a, b) for a, b in zip(before, policy_of(trainer), strict=True))
    trainer.step(make_groups(version=30), 30)
    assert not all(torch.equal(a, b) for a, b in zip(before, policy_of(trainer), strict=True))


def test_a_shared_critic_comes_back_with_the_checkpoint_and_stays_out_of_the_export(
    model_path: Path, tmp_path: Path
) -> None:
    knobs = (
        "algorithm.advantage.critic=shared",
        "algorithm.kl.ref_ema_eta=0.1",
        "algorithm.kl.coef=0.1",
    )
    trainer = make_trainer(model_path, "ppo_code", *knobs)
    trainer.step(make_groups(), 0)
    trainer.save(tmp_path / "checkpoint", 1).result()
    restored = make_trainer(model_path, "ppo_code", *knobs)
    assert restored.load(tmp_path / "checkpoint") == 1
    for version in (1, 2):
        expected, found = (
            t.step(make_groups(version, version=version), version).scalars
            for t in (trainer, restored)
        )
        for name in (
            "value/loss",
            "value/grad_norm",
            "policy/grad_norm",
            "value/explained_variance",
        ):
            assert found[name] == expected[name], name
    trainer.export_hf(tmp_path / "hf")
    names = {name for name, *_ in trainer.tensor_specs()}
    assert "value_head.weight" not in names
    exported, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    state = dict(zip([n for n, *_ in trainer.tensor_specs()], trainer.full_tensors(), strict=True))
    assert all(torch.equal(p, full_tensor(state[n])) for n, p in exported.named_parameters())


def test_a_rank_without_sequences_takes_part_in_the_gradient_of_a_shared_head(
    model_path: Path,
) -> None:
    policy = make_trainer(model_path, "ppo_code", "algorithm.advantage.critic=shared")._policy
    idle = pack(collate(make_groups(), device=torch.device("cpu")), [], device=torch.device("cpu"))
    output = policy(idle, temperature=1.0, chunk_tokens=16)
    (output.logprobs.sum() + output.values.at_tokens.sum()).backward()
    assert policy.value_head is not None
    assert [p.grad is not None and not p.grad.any() for p in policy.value_head.parameters()] == [
        True,
        True,
    ]
