"""Settings of the objective through whole steps: packing and ranks change nothing, state survives a
checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from learner_support import make_groups, make_trainer, relative_difference, spy_on_gradients

from async_rl.observability.catalogue import describe

OBJECTIVES = {
    "gspo": ["algorithm=gspo", "algorithm.policy_loss.max_mean_ratio=1.2"],
    "sequence_mis": [
        "algorithm.policy_loss.correction=sequence_mis",
        "algorithm.policy_loss.correction.min=0.1",
        "algorithm.policy_loss.correction.max=30",
    ],
    "geometric": ["algorithm=geometric"],
    "full_kl": [
        "algorithm.kl=loss",
        "algorithm.kl.coef=0.2",
        "algorithm.kl.estimator=full",
        "algorithm.entropy_coef=0.01",
    ],
    "kl_in_reward": ["algorithm.kl=reward", "algorithm.kl.coef=0.2"],
    "reinforce_plus_plus": ["algorithm=reinforce_plus_plus", "algorithm.aggregation=sequence_mean"],
    "cispo": ["algorithm=cispo"],
    "dr_grpo": ["algorithm=dr_grpo"],
    "m2po": ["algorithm=m2po"],
    "oapl": ["algorithm=oapl"],
    "vespo": ["algorithm=vespo"],
}


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
def test_no_objective_depends_on_the_packing(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, objective: str
) -> None:
    collected = spy_on_gradients(monkeypatch, is_stepping=False)
    groups = make_groups(ages=(0, 1), version=1)
    for budget in (8192, 70, 24):
        knobs = ("learner.minibatches=2", f"learner.budget_tokens={budget}")
        make_trainer(model_path, "grpo_code", *OBJECTIVES[objective], *knobs).step(groups, 1)
    whole, halves, single = (collected["policy"][2 * i : 2 * i + 2] for i in range(3))
    for first, *others in zip(whole, halves, single, strict=True):
        assert all(relative_difference(other, first) < 1e-6 for other in others)


def test_a_remax_step_reports_its_baseline_and_never_trains_it(model_path: Path) -> None:
    groups = [
        msgspec.structs.replace(g, baseline=g.trajectories[0], trajectories=g.trajectories[1:])
        for g in make_groups()
    ]
    result = make_trainer(model_path, "grpo_code", "algorithm=remax").step(groups, 0)
    assert result.scalars["tokens/trained"] == sum(
        t.response_length for g in groups for t in g.trajectories
    )
    expected = np.mean([g.baseline.score.reward for g in groups if g.baseline is not None])
    assert result.scalars["reward/baseline_mean"] == pytest.approx(float(expected))
    assert all(map(describe, result.scalars)), "every number is declared"


@pytest.mark.proves("algorithm.advantage.critic.value_norm")
@pytest.mark.parametrize("kind", ["exp", "ma"])
def test_the_critic_learns_faster_in_units_of_large_returns(model_path: Path, kind: str) -> None:
    def explained(*knobs: str) -> float:
        trainer = make_trainer(
            model_path,
            "ppo_code",
            "algorithm.advantage.critic.warmup_steps=20",
            "reward.scale=50",
            "reward.bias=-2",
            "reward.clip=1000",
            *knobs,
        )
        for _ in range(12):
            result = trainer.step(make_groups(), 0)
        return result.scalars["value/explained_variance"]

    assert explained(f"algorithm.advantage.critic.value_norm={kind}") > explained() + 0.05


def test_a_restored_run_goes_on_with_its_coefficient_and_its_units(
    model_path: Path, tmp_path: Path
) -> None:
    knobs = (
        "algorithm.kl.controller=adaptive",
        "algorithm.kl.controller.horizon=16",
        "algorithm.advantage.critic.value_norm=exp",
    )
    trainer = make_trainer(model_path, "ppo_code", *knobs)
    coefficients = [
        trainer.step(make_groups(v, version=v), v).scalars["policy/kl_coef"] for v in range(2)
    ]
    assert coefficients[1] == pytest.approx(0.8 * coefficients[0]), (
        "the policy is still near the reference, so the coefficient falls"
    )
    trainer.save(tmp_path / "step_2", 2).result()
    onward = trainer.step(make_groups(2, version=2), 2)
    restored = make_trainer(model_path, "ppo_code", *knobs)
    restored.load(tmp_path / "step_2")
    again = restored.step(make_groups(2, version=2), 2)
    for name in ("policy/kl_coef", "value/loss", "loss/policy", "value/explained_variance"):
        assert again.scalars[name] == onward.scalars[name]


@pytest.mark.proves("algorithm.advantage.critic.value_clip")
def test_a_clipped_value_update_costs_what_lies_beyond_the_clip(model_path: Path) -> None:
    def loss(*knobs: str) -> float:
        trainer = make_trainer(
            model_path,
            "ppo_code",
            "learner.epochs=3",
            "algorithm.advantage.critic.lr=6e-3",
            *knobs,
        )
        return trainer.step(make_groups(), 0).scalars["value/loss"]

    assert loss("algorithm.advantage.critic.value_clip=0.01") > loss() + 0.01


@pytest.mark.proves("algorithm.advantage.critic.value_coef")
def test_the_weight_of_the_value_loss_scales_the_critics_gradient(model_path: Path) -> None:
    def norm(coefficient: float) -> float:
        trainer = make_trainer(
            model_path,
            "ppo_code",
            f"algorithm.advantage.critic.value_coef={coefficient}",
            "learner.minibatches=1",
        )
        return trainer.step(make_groups(), 0).scalars["value/grad_norm"]

    assert norm(1.5) == pytest.approx(3 * norm(0.5), rel=1e-5)


@pytest.mark.proves("algorithm.policy_loss.clip_dual")
def test_a_dual_clip_bounds_what_unwanted_tokens_cost(model_path: Path) -> None:
    """All behavior log-probs are far below the policy's, so ratios to the behavior policy are
    large.
    """
    groups = make_groups()
    for t in (t for g in groups for t in g.trajectories):
        t.behavior_logprobs[t.loss_mask] = -20.0
    knobs = (
        "algorithm.policy_loss=ppo_vanilla",
        "algorithm.policy_loss.correction=none",
        "algorithm.advantage=dr_grpo",
    )
    bounded, free = (
        make_trainer(model_path, "grpo_code", *knobs, f"algorithm.policy_loss.clip_dual={c}").step(
            groups, 0
        )
        for c in ("3", "null")
    )
    assert 0 < bounded.scalars["loss/policy"] <= 3.0 < free.scalars["loss/policy"]
