"""The gradients of a step are equal to each other whatever the memory settings say; that they are
right is shown in test_steps_equal_the_oracle.py.
"""

from pathlib import Path

import pytest
import torch
from learner_support import (
    equal_rewards,
    make_groups,
    make_trainer,
    relative_difference,
    spy_on_gradients,
)
from tables import table
from torch import Tensor

from async_rl.config import learner
from async_rl.learner.update import Updater

BASE = (
    "learner.minibatches=2",
    "learner.epochs=2",
    "algorithm.entropy_coef=0.01",
    "generation.temperature=0.8",
)


@pytest.mark.covers(
    "log_prob_micro_batch_size", "ppo_micro_batch_size", "enable_gradient_checkpointing"
)
@pytest.mark.parametrize("knobs", table(__file__, "memory_knobs_do_not_change"))
@pytest.mark.parametrize("conf", ["ppo_code", "grpo_code"])
def test_memory_knobs_do_not_change_gradients(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, conf: str, knobs: list[str]
) -> None:
    collected = spy_on_gradients(monkeypatch, is_stepping=False)
    for overrides in ([], knobs):
        if overrides == ["small chunks of logits"]:
            monkeypatch.setattr(learner, "CPU_LOGITS_MB", 0.0006)
            overrides = []
        make_trainer(model_path, conf, *BASE, *overrides).step(
            make_groups(ages=(0, 1), version=1), 1
        )
    for name, gradients in collected.items():
        half = len(gradients) // 2
        assert half == 4
        for plain, other in zip(gradients[:half], gradients[half:], strict=True):
            assert relative_difference(other, plain) < 1e-6, name


def test_sequences_without_advantage_get_no_backward_pass_and_change_no_gradient(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs = ("learner.budget_tokens=30", "learner.epochs=2", "learner.minibatches=2")
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


@pytest.mark.parametrize(("knobs", "is_silent"), table(__file__, "a_batch_of_equal_rewards"))
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
