import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from learner_support import (
    equal,
    equal_rewards,
    make_groups,
    make_trainer,
    policy_of,
    spy_on_gradients,
    weights_of,
)
from transformers import AutoModelForCausalLM

from async_rl.batching.batch import collate_part, whole
from async_rl.batching.packing import pack
from async_rl.core.errors import NonFiniteError, RewardError, StalenessError
from async_rl.core.types import Trajectory
from async_rl.observability.catalogue import describe

CPU = torch.device("cpu")
SHARED = "algorithm.advantage.critic=shared"


@pytest.mark.parametrize("conf", ["grpo_code", "ppo_code"])
def test_every_reported_number_is_declared_and_finite(model_path: Path, conf: str) -> None:
    result = make_trainer(model_path, conf).step(make_groups(), 0)
    assert [name for name in result.scalars if describe(name) is None] == []
    assert result.scalars["reward/part/style"] == 0.25
    assert all(math.isfinite(value) for value in result.scalars.values())
    assert ("value/loss" in result.scalars) == (conf == "ppo_code")
    assert ("policy/kl_reference" in result.scalars) == (conf == "ppo_code")


@pytest.mark.covers("check_verifier_status")
def test_a_step_of_which_no_sample_is_rewarded_stops_the_run_where_that_is_asked_for(
    model_path: Path,
) -> None:
    groups = equal_rewards(make_groups(), every=1, reward=0.0)
    scalars = make_trainer(model_path, "grpo_code").step(groups, 0).scalars
    assert scalars["reward/failed_share"] == 1.0
    asking = make_trainer(model_path, "grpo_code", "reward.stop_on=[all_failed]")
    before = weights_of(asking)
    told = r"step 1: none of its 16 samples has a reward above reward\.fail_reward=0"
    with pytest.raises(RewardError, match=told):
        asking.step(groups, 0)
    assert equal(weights_of(asking), before)
    groups = [*groups[:3], *equal_rewards(groups[3:], every=1, reward=0.1)]
    assert asking.step(groups, 0).scalars["reward/failed_share"] == 0.75


def test_logprobs_are_those_of_the_model_itself(model_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    rows = [np.array(row, dtype=np.int32) for row in ([3, 1, 4, 1, 5], [9], [2, 7])]
    found = make_trainer(model_path, "grpo_code", "generation.temperature=0.5").logprobs(rows)
    for row, logprobs in zip(rows, found, strict=True):
        ids = torch.from_numpy(row).long()[None]
        logp = torch.log_softmax(model(ids).logits[0, :-1], -1).detach()
        assert logprobs[0] == 0
        np.testing.assert_allclose(logprobs[1:], logp.gather(1, ids[0, 1:, None])[:, 0], atol=1e-5)


@pytest.mark.covers("temperature", "temperature of generator and learner")
def test_temperature_divides_the_learners_logits(model_path: Path) -> None:
    groups = make_groups()
    cold = make_trainer(model_path, "grpo_code", "generation.temperature=0.5").step(groups, 0)
    warm = make_trainer(model_path, "grpo_code", "generation.temperature=2.0").step(groups, 0)
    assert cold.scalars["policy/entropy"] < warm.scalars["policy/entropy"] - 0.1


@pytest.mark.proves("algorithm.advantage.critic.lr", "algorithm.advantage.critic.schedule")
@pytest.mark.covers("critic_warmup")
def test_the_policy_and_its_schedule_begin_after_the_warm_up_of_the_critic(
    model_path: Path,
) -> None:
    """Otherwise the policy would begin in the middle of its own warm-up or decay."""
    knobs = (
        "num_steps=8",
        "algorithm.advantage.critic.warmup_steps=3",
        "learner.optimizer.lr=1e-3",
        "learner.optimizer.warmup_steps=4",
        "algorithm.advantage.critic.lr=1e-2",
        "algorithm.advantage.critic.schedule=constant",
    )
    trainer = make_trainer(model_path, "ppo_code", *knobs)
    start, found = weights_of(trainer), []
    for version in range(8):
        found.append(trainer.step(make_groups(version=version), version).scalars)
        assert equal(weights_of(trainer), start) == (version < 3)
    assert found[-1]["value/loss"] < 0.9 * found[0]["value/loss"]
    assert [step["policy/lr"] for step in found[:7]] == pytest.approx(
        [0, 0, 0, 0.25e-3, 0.5e-3, 0.75e-3, 1e-3]
    )
    assert [step["value/lr"] for step in found] == pytest.approx(
        [0.25e-2, 0.5e-2, 0.75e-2, *[1e-2] * 5]
    )


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


def test_the_cosine_of_the_policy_reaches_its_floor_whatever_the_critics_warm_up(
    model_path: Path,
) -> None:
    knobs = ("num_steps=40", "learner.optimizer.lr=1")
    trainer = make_trainer(
        model_path, "ppo_code", *knobs, "algorithm.advantage.critic.warmup_steps=16"
    )
    last = trainer.step(make_groups(version=39), 39).scalars
    assert last["policy/lr"] == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize("broken", ["behavior_logprobs", "reward"])
def test_a_loss_that_is_not_finite_is_refused_before_anything_changes(
    model_path: Path, broken: str
) -> None:
    trainer = make_trainer(model_path, "grpo_code")
    groups = make_groups()
    before = weights_of(trainer)
    bad: Trajectory = groups[2].trajectories[0]
    if broken == "reward":
        groups[2].trajectories[0] = msgspec.structs.replace(
            bad, score=msgspec.structs.replace(bad.score, reward=math.nan)
        )
    else:
        bad.behavior_logprobs[bad.prompt_length] = np.nan
    with pytest.raises(NonFiniteError, match=r"step 1, groups 0, 1, 2, 3: policy: loss nan"):
        trainer.step(groups, 0)
    assert equal(before, weights_of(trainer))
    trainer.step(make_groups(), 0)
    assert all(bool(t.isfinite().all()) for t in weights_of(trainer))


def test_an_over_age_token_is_refused_where_groups_are_to_be_dropped(model_path: Path) -> None:
    trainer = make_trainer(model_path, "grpo_code", "buffer.max_staleness_versions=2")
    with pytest.raises(StalenessError, match="3 versions old"):
        trainer.step(make_groups(ages=(0, 3), version=5), 5)
    with pytest.raises(StalenessError, match="sampled by version 6"):
        trainer.step(make_groups(version=6), 5)


@pytest.mark.parametrize("ages", [(0, 3), (3,)])
def test_over_age_tokens_are_masked_where_they_are_to_be_masked(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, ages: tuple[int, ...]
) -> None:
    collected = spy_on_gradients(monkeypatch)
    groups = make_groups(ages=ages, version=5)
    knobs = ("buffer.max_staleness_versions=2", "buffer.age_rule=mask")
    scalars = make_trainer(model_path, "grpo_code", *knobs).step(groups, 5).scalars
    fresh = sum(int((t.versions == 5).sum()) for g in groups for t in g.trajectories)
    assert scalars["tokens/trained"] == fresh
    assert scalars["staleness/max_versions"] == 0
    assert all(math.isfinite(value) for value in scalars.values())
    assert any(g.any() for g in collected["policy"][0]) == (fresh > 0)


def test_samples_of_an_older_version_show_no_mismatch_of_the_engine(model_path: Path) -> None:
    groups = make_groups(ages=(1,), version=3)
    result = make_trainer(model_path, "grpo_code").step(groups, 3)
    assert "mismatch/engine_abs_mean" not in result.scalars
    assert result.scalars["mismatch/stale_abs_mean"] > 0.0


@pytest.mark.covers("dtype")
def test_bfloat16_compute_keeps_float32_masters_and_follows_float32(
    model_path: Path, tmp_path: Path, process_group: None
) -> None:
    knobs = ("model.dtype=bfloat16",)
    trainer = make_trainer(model_path, "ppo_code", *knobs)
    result = trainer.step(make_groups(), 0)
    plain = make_trainer(model_path, "ppo_code").step(make_groups(), 0)
    for name in ("policy/entropy", "policy/grad_norm", "value/loss"):
        assert result.scalars[name] == pytest.approx(plain.scalars[name], rel=0.02), name
    assert {t.dtype for t in trainer.full_tensors()} == {torch.bfloat16}
    assert {spec.dtype for spec in trainer.tensor_specs()} == {"bfloat16"}
    trainer.save(tmp_path / "step_1", 1).result()
    restored = make_trainer(model_path, "ppo_code", *knobs)
    assert restored.load(tmp_path / "step_1") == 1
    first, second = (
        t.step(make_groups(1, version=1), 1).scalars["loss/policy"] for t in (trainer, restored)
    )
    assert first == second


@pytest.mark.proves("algorithm.kl.ref_ema_eta")
def test_a_moving_reference_takes_on_a_share_of_the_policy_after_each_step(
    model_path: Path,
) -> None:
    knobs = ("algorithm.kl.ref_ema_eta=0.25", "algorithm.kl.coef=0.1", "learner.optimizer.lr=1e-2")
    trainer = make_trainer(model_path, "ppo_code", *knobs)
    reference = trainer._moving_reference
    assert reference is not None
    start = [t.clone() for t in trainer.full_tensors()]
    expected = start
    for version in range(2):
        trainer.step(make_groups(version, version=version), version)
        expected = [
            0.75 * r + 0.25 * p for r, p in zip(expected, trainer.full_tensors(), strict=True)
        ]
    for mine, wanted in zip(reference.parameters(), expected, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)
