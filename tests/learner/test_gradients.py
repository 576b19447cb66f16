"""The gradients of a step: equal to a slow float64 oracle, and equal to each other whatever the
memory knobs say.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_support import (
    equal_rewards,
    make_groups,
    make_trainer,
    relative_difference,
    spy_on_gradients,
)
from torch import Tensor
from transformers import AutoModelForCausalLM

from async_rl.config import learner
from async_rl.core.types import Group
from async_rl.learner import update
from async_rl.learner.update import Updater


def sequence_logprobs(
    model: torch.nn.Module, token_ids: np.ndarray, prompt_length: int
) -> tuple[Tensor, Tensor]:
    ids = torch.from_numpy(token_ids.astype(np.int64))[None]
    logp = torch.log_softmax(
        model(input_ids=ids, use_cache=False).logits[0, prompt_length - 1 : -1], -1
    )
    return logp.gather(1, ids[0, prompt_length:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def oracle_gradients(
    model_path: Path, groups: Sequence[Group], *, entropy_coef: float, kl_coef: float
) -> list[Tensor]:
    """GRPO with token TIS at 2, one sequence at a time, in float64. Reference = start model, moved
    a little to make the KL matter.
    """
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64)
    trajectories = [t for g in groups for t in g.trajectories]
    total = sum(t.response_length for t in trajectories)
    loss = torch.zeros((), dtype=torch.float64)
    for group in groups:
        rewards = np.array([t.score.reward for t in group.trajectories])
        for trajectory in group.trajectories:
            advantage = (trajectory.score.reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            logprobs, entropies = sequence_logprobs(
                model, trajectory.token_ids, trajectory.prompt_length
            )
            proximal = logprobs.detach()
            behavior = torch.from_numpy(
                trajectory.behavior_logprobs[trajectory.prompt_length :]
            ).double()
            weight = (proximal - behavior).exp().clamp(max=2.0)
            loss = (
                loss
                - (
                    weight * (logprobs - proximal).exp() * advantage + entropy_coef * entropies
                ).sum()
                / total
            )
            kl = (proximal - logprobs).exp() - 1 - (proximal - logprobs)
            loss = loss + kl_coef * (weight * kl).sum() / total
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.proves("algorithm.entropy_coef")
@pytest.mark.covers("entropy_coeff")
@pytest.mark.parametrize(("entropy_coef", "kl_coef"), [(0.0, 0.0), (0.1, 0.0), (0.1, 0.5)])
def test_grpo_gradient_equals_the_oracle(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, entropy_coef: float, kl_coef: float
) -> None:
    groups = make_groups()
    collected = spy_on_gradients(monkeypatch)
    trainer = make_trainer(
        model_path,
        "grpo_code",
        f"algorithm.entropy_coef={entropy_coef}",
        *(["algorithm.kl=loss", f"algorithm.kl.coef={kl_coef}"] if kl_coef else []),
    )
    trainer.step(groups, 0)
    expected = oracle_gradients(model_path, groups, entropy_coef=entropy_coef, kl_coef=kl_coef)
    assert relative_difference(collected["policy"][0], expected) < 1e-5


BASE = (
    "learner.minibatches=2",
    "learner.epochs=2",
    "algorithm.entropy_coef=0.01",
    "generation.temperature=0.8",
)


@pytest.mark.covers(
    "log_prob_micro_batch_size", "ppo_micro_batch_size", "enable_gradient_checkpointing"
)
@pytest.mark.parametrize(
    "knobs",
    [
        ["learner.budget_tokens=24"],
        ["learner.budget_tokens=70"],
        ["learner.budget_tokens=24", "learner.forward_budget_tokens=70"],
        ["small chunks of logits"],
        ["learner.gradient_checkpointing=true"],
    ],
)
@pytest.mark.parametrize("conf", ["ppo_code", "grpo_code"])
def test_memory_knobs_do_not_change_gradients(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, conf: str, knobs: list[str]
) -> None:
    collected = spy_on_gradients(monkeypatch, is_stepping=False)
    for overrides in ([], knobs):
        if overrides == ["small chunks of logits"]:
            monkeypatch.setattr(learner, "_CPU_LOGITS_MB", 0.0006)
            overrides = []
        make_trainer(model_path, conf, *BASE, *overrides).step(
            make_groups(ages=(0, 1), version=1), 1
        )
    for name, gradients in collected.items():
        half = len(gradients) // 2
        assert half == 4
        for plain, other in zip(gradients[:half], gradients[half:], strict=True):
            assert relative_difference(other, plain) < 1e-6, name


def test_sharing_prompts_does_not_change_gradients(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from async_rl.batching.batch import Batch, collate

    def unshared(groups: Sequence[Group], *, device: torch.device) -> Batch:
        batch = collate(groups, device=device)
        batch.prompt_key[:] = range(batch.num_sequences)
        return batch

    collected = spy_on_gradients(monkeypatch)
    make_trainer(model_path, "ppo_code", "learner.minibatches=1").step(make_groups(), 0)
    monkeypatch.setattr("async_rl.learner.trainer.collate", unshared)
    make_trainer(model_path, "ppo_code", "learner.minibatches=1").step(make_groups(), 0)
    for shared, separate in collected.values():
        assert relative_difference(shared, separate) < 1e-6


def test_a_separate_proximal_pass_gives_the_same_gradient_as_the_shared_one(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One update and no KL: the training pass itself gives the proximal log-probs. A second run
    computes them before.
    """
    from async_rl.learner.forward_passes import ForwardPasses

    collected = spy_on_gradients(monkeypatch, is_stepping=False)
    groups = make_groups(ages=(0, 1), version=1)
    streamed = make_trainer(model_path, "grpo_code").step(groups, 1)
    monkeypatch.setattr(update, "needs_policy_before", lambda *_: True)
    monkeypatch.setattr(ForwardPasses, "_reusable", lambda *_: set())
    separate = make_trainer(model_path, "grpo_code").step(groups, 1)
    first, second = collected["policy"]
    assert relative_difference(first, second) < 1e-6
    for name, value in separate.scalars.items():
        if not name.startswith("time/"):
            assert streamed.scalars[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_kept_graphs_give_the_same_gradients_as_running_again(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from async_rl.learner.forward_passes import ForwardPasses

    collected = spy_on_gradients(monkeypatch)
    make_trainer(model_path, "ppo_code").step(make_groups(), 0)
    monkeypatch.setattr(ForwardPasses, "_reusable", lambda *_: set())
    make_trainer(model_path, "ppo_code").step(make_groups(), 0)
    for name in ("policy", "critic"):
        kept, again = collected[name][:2], collected[name][2:]
        assert all(relative_difference(a, b) < 1e-5 for a, b in zip(kept, again, strict=True))


@pytest.mark.parametrize("correction", ["token_tis", "token_mis"])
def test_with_fresh_data_every_correction_is_the_plain_policy_gradient(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, correction: str
) -> None:
    groups = make_groups()
    scorer = make_trainer(model_path, "grpo_code")
    for trajectory in (t for g in groups for t in g.trajectories):
        trajectory.behavior_logprobs[:] = np.where(
            trajectory.loss_mask, scorer.logprobs([trajectory.token_ids])[0], 0
        )
    collected = spy_on_gradients(monkeypatch, is_stepping=False)
    result = make_trainer(
        model_path,
        "grpo_code",
        f"algorithm.policy_loss.correction={correction}",
    ).step(groups, 0)
    assert result.scalars["policy/behavior_weight_max"] == pytest.approx(1.0, abs=1e-4)
    assert result.scalars["policy/kl_proximal_policy"] == 0.0
    assert result.scalars["policy/clip_fraction"] == 0.0
    assert result.scalars["mismatch/engine_abs_max"] < 1e-4
    assert relative_difference(collected["policy"][0], _policy_gradient(model_path, groups)) < 1e-4


def _policy_gradient(model_path: Path, groups: Sequence[Group]) -> list[Tensor]:
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64)
    total = sum(t.response_length for g in groups for t in g.trajectories)
    for group in groups:
        rewards = np.array([t.score.reward for t in group.trajectories])
        for t in group.trajectories:
            advantage = (t.score.reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            (
                -advantage * sequence_logprobs(model, t.token_ids, t.prompt_length)[0].sum() / total
            ).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("minibatches", [1, 2])
def test_sequences_without_advantage_get_no_backward_pass_and_change_no_gradient(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, minibatches: int
) -> None:
    knobs = ("learner.budget_tokens=30", "learner.epochs=2", f"learner.minibatches={minibatches}")
    groups = equal_rewards(make_groups(ages=(0, 1), version=1), every=2)
    collected = spy_on_gradients(monkeypatch, is_stepping=False)
    num_backward = 0
    backward = torch.Tensor.backward

    def counted(self: Tensor) -> None:
        nonlocal num_backward
        num_backward += 1
        backward(self)

    monkeypatch.setattr(torch.Tensor, "backward", counted)
    skipping = make_trainer(model_path, "grpo_code", *knobs).step(groups, 1)
    few, num_backward = num_backward, 0
    monkeypatch.setattr(
        Updater,
        "_has_gradient",
        lambda self, batch, mask: torch.ones(batch.num_sequences, dtype=torch.bool),
    )
    plain = make_trainer(model_path, "grpo_code", *knobs).step(groups, 1)
    assert few <= 0.7 * num_backward
    half = len(collected["policy"]) // 2
    for mine, other in zip(collected["policy"][:half], collected["policy"][half:], strict=True):
        assert relative_difference(mine, other) < 1e-6
    for name, value in plain.scalars.items():
        if not name.startswith("time/"):
            assert skipping.scalars[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize(
    ("knobs", "is_silent"),
    [
        ([], True),
        (["algorithm.entropy_coef=0.01"], False),
        (["algorithm.kl=loss"], False),
        (["algorithm.normalize_advantages=batch"], True),
    ],
)
def test_a_batch_of_equal_rewards_is_silent_only_where_advantages_are_the_whole_loss(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, knobs: list[str], is_silent: bool
) -> None:
    trainer = make_trainer(model_path, "grpo_code", *knobs)
    groups = make_groups()
    trainer.step(groups, 0)
    before = [t.clone() for t in trainer.full_tensors()]
    collected = spy_on_gradients(monkeypatch)
    result = trainer.step(equal_rewards(groups, every=1), 0)
    assert all(not g.any() for g in collected["policy"][0]) == is_silent
    assert result.scalars["policy/entropy"] > 0
    after = [t.clone() for t in trainer.full_tensors()]
    assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), (
        "the optimizer's moments go on"
    )
