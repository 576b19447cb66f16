"""A PPO step with a critic, on a backbone of its own or on the policy's: gradients of both against
a slow oracle, and what is trained.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from learner_support import make_groups, make_trainer, relative_difference, spy_on_gradients
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from async_rl.batching.batch import collate
from async_rl.batching.packing import pack
from async_rl.config import learner
from async_rl.core.types import Group
from async_rl.learner.sharding import full_tensor
from async_rl.learner.trainer import Trainer

GAMMA, LAMBDA, VALUE_COEF, ENTROPY_COEF = 0.97, 0.9, 0.7, 0.02
KNOBS = (
    f"algorithm.advantage.gamma={GAMMA}",
    f"algorithm.advantage.gae_lambda={LAMBDA}",
    f"algorithm.advantage.critic.value_coef={VALUE_COEF}",
    f"algorithm.entropy_coef={ENTROPY_COEF}",
    "algorithm.kl=none",
    "learner.minibatches=1",
)


def value_head_of(trainer: Trainer) -> nn.Linear:
    """The head, which begins at 0 and would hide the gradient of its backbone: made random, the
    same in every trainer.
    """
    head = next(
        m
        for p in (trainer._policy, trainer._models.critic)
        if p
        for m in p.modules()
        if getattr(m, "out_features", 0) == 1
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return head


def gae_oracle(
    rewards: Sequence[float], values: Sequence[float], bootstrap: float
) -> tuple[list[float], list[float]]:
    advantages, carried = [0.0] * len(values), 0.0
    for t in reversed(range(len(values))):
        following = values[t + 1] if t + 1 < len(values) else bootstrap
        carried = rewards[t] + GAMMA * following - values[t] + GAMMA * LAMBDA * carried
        advantages[t] = carried
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def oracle(
    path: Path, groups: Sequence[Group], head: nn.Linear, *, is_shared: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of policy and critic in float64, one sequence at a time, nothing packed, the whole
    logits in memory.
    """
    lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    backbone = lm.model if is_shared else copy.deepcopy(lm.model)
    head = copy.deepcopy(head).double()
    head.zero_grad()
    samples = []
    for t in (t for g in groups for t in g.trajectories):
        ids, start = torch.from_numpy(t.token_ids).long()[None], t.prompt_length
        logp = torch.log_softmax(lm(ids, use_cache=False).logits[0, start - 1 : -1], -1)
        values = head(backbone(ids, use_cache=False).last_hidden_state[0, start - 1 :])[:, 0]
        known = values.detach()
        rewards = [0.0] * (t.response_length - 1) + [t.score.reward]
        advantages, returns = gae_oracle(rewards, known[:-1].tolist(), bootstrap=0.0)
        samples.append(
            (t, logp, logp.gather(1, ids[0, start:, None])[:, 0], values[:-1], advantages, returns)
        )
    flat = [a for *_, advantages, _ in samples for a in advantages]
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((a - mean) ** 2 for a in flat) / len(flat))
    policy_loss = value_loss = torch.zeros((), dtype=torch.float64)
    for t, logp, chosen, values, advantages, returns in samples:
        normed = (torch.tensor(advantages, dtype=torch.float64) - mean) / (std + 1e-5)
        behavior = torch.from_numpy(t.behavior_logprobs[t.prompt_length :]).double()
        weight = (chosen.detach() - behavior).exp().clamp(max=2.0)
        policy_loss = policy_loss - (
            weight * normed * (chosen - chosen.detach()).exp()
        ).sum() / len(flat)
        policy_loss = policy_loss + ENTROPY_COEF * (logp.exp() * logp).sum() / len(flat)
        value_loss = value_loss + 0.5 * (
            values - torch.tensor(returns, dtype=torch.float64)
        ).square().sum() / len(flat)
    (policy_loss + VALUE_COEF * value_loss).backward()
    own = [] if is_shared else [p.grad for p in backbone.parameters()]
    return [p.grad for p in lm.parameters()], [*own, *(p.grad for p in head.parameters())]


@pytest.mark.parametrize("backbone", ["own", "shared"])
@pytest.mark.parametrize(
    ("knobs", "chunk_mb"), [((), 16.0), (("learner.budget_tokens=30",), 0.001)]
)
def test_the_gradients_of_a_ppo_step_equal_the_oracle(
    model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backbone: str,
    knobs: tuple[str, ...],
    chunk_mb: float,
) -> None:
    monkeypatch.setattr(learner, "_CPU_LOGITS_MB", chunk_mb)
    groups = make_groups(ages=(0, 1), version=1)
    collected = spy_on_gradients(monkeypatch)
    trainer = make_trainer(
        model_path, "ppo_code", *KNOBS, f"algorithm.advantage.critic={backbone}", *knobs
    )
    head = value_head_of(trainer)
    policy, critic = oracle(model_path, groups, head, is_shared=backbone == "shared")
    trainer.step(groups, 1)
    assert relative_difference(collected["policy"][0], policy) < 1e-5
    assert relative_difference(collected["critic"][0], critic) < 1e-5


@pytest.mark.proves("algorithm.advantage.critic", "algorithm.advantage")
def test_a_shared_backbone_gets_the_gradient_of_the_values_too(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected = spy_on_gradients(monkeypatch, is_stepping=False)
    for backbone in ("own", "shared"):
        trainer = make_trainer(
            model_path, "ppo_code", *KNOBS, f"algorithm.advantage.critic={backbone}"
        )
        value_head_of(trainer)
        trainer.step(make_groups(), 0)
    own, shared = collected["policy"]
    assert relative_difference(own, shared) > 0.05
    assert [len(g) for g in collected["critic"]] == [
        len(own) + 2,
        2,
    ], "with a backbone of its own, the critic trains that; else a head"


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
