"""Every update of a second step, at the minibatches, epochs and masks of each preset and on
conversations of several turns, has the gradient of a float64 oracle.

One minibatch of responses without foreign tokens hides much: log-probs that only the first
minibatch has, statistics over tokens that nobody trains, terms that are 0 while policy and
reference are one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from learner_support import make_groups, make_trainer, relative_difference, spy_on_gradients
from step_oracle import Objective, StepOracle, conversations, record_updates

GRPO = Objective()
PPO = Objective(advantage="gae", normalize="batch", kl_in_reward=0.001)
SEQUENCES = Objective(
    loss="gspo",
    clip_low=3e-4,
    clip_high=4e-4,
    correction="sequence_tis",
    aggregation="sequence_mean",
)
PRESETS = {
    "ppo_code": (PPO, 2),
    "grpo_code": (GRPO, 1),
    "grpo_code_retry": (GRPO, 1),
    "grpo_code algorithm=dr_grpo": (
        Objective(advantage="dr_grpo", aggregation="sequence_sum"),
        1,
    ),
    "grpo_code algorithm=gspo": (SEQUENCES, 4),
    "grpo_code algorithm=cispo learner.minibatches=2": (
        Objective(loss="cispo", clip_low=1.0, clip_high=2.0),
        2,
    ),
    "grpo_code algorithm=rloo": (Objective(advantage="rloo"), 1),
    "grpo_code algorithm=remax": (Objective(advantage="remax"), 1),
    "grpo_code algorithm=reinforce_plus_plus": (
        Objective(advantage="reinforce_plus_plus", normalize="batch"),
        1,
    ),
}
TWICE = "learner.minibatches=2 learner.epochs=2 learner.budget_tokens=30"
"""Small passes: no update depends on how its sequences are packed."""
LOSS = "algorithm.policy_loss"
FRESH = "buffer.max_staleness_versions=0"
CRITIC = "algorithm.advantage.critic"
VARIANTS = {
    f"grpo_code {TWICE} algorithm=gspo": (SEQUENCES, 4),
    f"grpo_code {TWICE} algorithm.truncated=mask": (Objective(masks_truncated=True), 4),
    f"ppo_code {TWICE} algorithm.truncated=mask": (
        Objective(advantage="gae", normalize="batch", kl_in_reward=0.001, masks_truncated=True),
        4,
    ),
    **{
        f"grpo_code {TWICE} algorithm.kl=loss algorithm.kl.coef=0.3 algorithm.kl.estimator={kl}": (
            Objective(kl_in_loss=0.3, kl_estimator=kl),
            4,
        )
        for kl in ("abs", "k2", "k3", "full")
    },
    f"grpo_code {TWICE} {LOSS}.clip_low=0.02 {LOSS}.clip_high=0.03 {LOSS}.correction=none"
    f" {FRESH}": (
        Objective(clip_low=0.02, clip_high=0.03, correction="none"),
        4,
    ),
    f"grpo_code {TWICE} {LOSS}=ppo_vanilla {LOSS}.correction=none {LOSS}.clip_dual=1.3"
    f" {LOSS}.max_mean_ratio=1.1": (
        Objective(loss="ppo_vanilla", correction="none", clip_dual=1.3, max_mean_ratio=1.1),
        4,
    ),
    f"grpo_code {TWICE} {LOSS}.max_mean_ratio=1.001": (Objective(max_mean_ratio=1.001), 4),
    f"grpo_code {LOSS}=reinforce": (Objective(loss="reinforce"), 1),
    f"grpo_code {TWICE} {LOSS}.correction=token_mis {LOSS}.correction.min=0.7"
    f" {LOSS}.correction.max=1.5": (
        Objective(correction="token_mis", weight_min=0.7, weight_max=1.5),
        4,
    ),
    f"ppo_code {TWICE} algorithm.advantage=vtrace algorithm.advantage.gamma=0.9"
    f" algorithm.advantage.gae_lambda=0.8 {CRITIC}.value_coef=0.7": (
        Objective(
            advantage="vtrace",
            normalize="batch",
            kl_in_reward=0.001,
            gamma=0.9,
            lam=0.8,
            value_coef=0.7,
        ),
        4,
    ),
    f"ppo_code {TWICE} {CRITIC}=shared {CRITIC}.value_clip=0.01 algorithm.entropy_coef=0.02": (
        Objective(
            advantage="gae",
            normalize="batch",
            kl_in_reward=0.001,
            value_clip=0.01,
            entropy_coef=0.02,
            has_shared_critic=True,
        ),
        4,
    ),
    f"grpo_code {TWICE} algorithm=rloo algorithm.kl=reward algorithm.kl.coef=0.3": (
        Objective(advantage="rloo", kl_in_reward=0.3),
        4,
    ),
    f"grpo_code {TWICE} algorithm.entropy_coef=0.1": (Objective(entropy_coef=0.1), 4),
    f"grpo_code {TWICE} algorithm.policy_loss.correction=sequence_mis"
    " algorithm.policy_loss.correction.min=0.5": (
        Objective(correction="sequence_mis", weight_min=0.5),
        4,
    ),
    f"ppo_code {TWICE} algorithm.truncated=bootstrap": (
        Objective(
            advantage="gae", normalize="batch", kl_in_reward=0.001, bootstraps_truncated=True
        ),
        4,
    ),
    f"grpo_code algorithm=geometric {TWICE}": (
        Objective(correction="sequence_tis", geometric_max=1.5, geometric_min=0.67),
        4,
    ),
    f"grpo_code algorithm=sapo {TWICE}": (Objective(loss="sapo"), 4),
    f"grpo_code {TWICE} algorithm.policy_loss=dppo algorithm.policy_loss.max_shift=0.02": (
        Objective(loss="dppo", max_shift=0.02),
        4,
    ),
    f"grpo_code {TWICE} algorithm.policy_loss=vespo algorithm.aggregation=sequence_sum": (
        Objective(loss="vespo", aggregation="sequence_sum"),
        4,
    ),
    f"grpo_code algorithm=oapl {TWICE}": (
        Objective(advantage="oapl", loss="oapl", aggregation="sequence_sum"),
        4,
    ),
    f"grpo_code algorithm=m2po {TWICE}": (Objective(correction="m2po"), 4),
    f"ppo_code {TWICE} algorithm.kl.coef=0.3 algorithm.advantage.gamma=0.9"
    " algorithm.advantage.gae_lambda=0.8": (
        Objective(advantage="gae", normalize="batch", kl_in_reward=0.3, gamma=0.9, lam=0.8),
        4,
    ),
}


@pytest.mark.proves(
    "algorithm.advantage",
    "algorithm.advantage.critic",
    "algorithm.advantage.critic.value_clip",
    "algorithm.advantage.critic.value_coef",
    "algorithm.advantage.gae_lambda",
    "algorithm.advantage.gamma",
    "algorithm.aggregation",
    "algorithm.aggregation.tokens",
    "algorithm.entropy_coef",
    "algorithm.kl",
    "algorithm.kl.coef",
    "algorithm.kl.estimator",
    "algorithm.policy_loss",
    "algorithm.policy_loss.clip_dual",
    "algorithm.policy_loss.clip_high",
    "algorithm.policy_loss.clip_low",
    "algorithm.policy_loss.correction",
    "algorithm.policy_loss.correction.max",
    "algorithm.policy_loss.correction.min",
    "algorithm.policy_loss.max_mean_ratio",
    "algorithm.policy_loss.max_shift",
    "algorithm.truncated",
    "learner.epochs",
)
@pytest.mark.covers(
    "cliprange_value",
    "decoupled objective",
    "early_stop_imp_ratio",
    "entropy_coeff",
    "gamma, lam",
    "kl_coef in the reward",
    "mask_too_long",
    "masks inside a response",
    "ppo_epochs",
    "values of truncated responses",
)
@pytest.mark.parametrize("case", [*PRESETS, *VARIANTS])
def test_every_update_of_a_step_has_the_gradient_of_the_oracle(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    objective, num_updates = (PRESETS | VARIANTS)[case]
    conf, *overrides = case.split()
    rates = ["learner.optimizer.lr=3e-3"]
    if conf == "ppo_code":
        rates.append("algorithm.advantage.critic.lr=3e-3")
    trainer = make_trainer(model_path, conf, *overrides, *rates)
    # After one step the policy differs from its reference, and values from 0.
    trainer.step(conversations(make_groups(), trainer), 0)
    ages = (0,) if FRESH in case else (0, 1)
    groups = conversations(make_groups(1, version=1, ages=ages), trainer)
    updates = record_updates(trainer, monkeypatch)
    collected = spy_on_gradients(monkeypatch)
    trainer.step(groups, 1)
    assert len(updates) == num_updates
    oracle = StepOracle(model_path, groups, updates[0], objective)
    expected = [oracle.gradients(update) for update in updates]
    for name, gradients in collected.items():
        # All updates together: where most tokens are clipped, the gradient is what rounding leaves.
        difference = relative_difference(
            [gradient for update in gradients for gradient in update],
            [gradient for update in expected for gradient in update[name]],
        )
        assert difference < 1e-5, name


@pytest.mark.parametrize("conf", ["ppo_code", "grpo_code"])
def test_the_minibatches_of_an_epoch_contain_every_sequence_once(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, conf: str
) -> None:
    trainer = make_trainer(model_path, conf, "learner.minibatches=4", "learner.epochs=2")
    updates = record_updates(trainer, monkeypatch)
    trainer.step(make_groups(), 0)
    orders = []
    for epoch in (updates[:4], updates[4:]):
        sequences = [s for update in epoch for s in update.sequences]
        assert sorted(sequences) == list(range(16))
        orders.append(sequences)
    assert orders[0] != orders[1]


@pytest.mark.proves(
    "algorithm.kl.controller", "algorithm.kl.controller.target", "algorithm.kl.controller.horizon"
)
@pytest.mark.covers("use_adaptive_kl_ctl")
def test_the_adaptive_coefficient_follows_the_kl_of_tokens_that_the_policy_wrote(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log-probs of tokens that an environment wrote say nothing about the policy."""
    knobs = (
        "algorithm.kl.controller=adaptive",
        "algorithm.kl.coef=0.1",
        "algorithm.kl.controller.horizon=16",
        "learner.optimizer.lr=3e-3",
    )
    trainer = make_trainer(model_path, "ppo_code", *knobs)
    trainer.step(conversations(make_groups(), trainer), 0)
    groups = conversations(make_groups(6, version=1), trainer)
    updates = record_updates(trainer, monkeypatch)
    trainer.step(groups, 1)
    kl = StepOracle(model_path, groups, updates[0], PPO).kl_per_sequence()
    assert kl > 0.01
    found = []
    for target in (kl / 3, kl / 1.1, 3 * kl):
        again = make_trainer(
            model_path, "ppo_code", *knobs, f"algorithm.kl.controller.target={target}"
        )
        again.step(conversations(make_groups(), again), 0)
        before = again.step(groups, 1).scalars["policy/kl_coef"]
        found.append(again.step(groups, 1).scalars["policy/kl_coef"] / before)
    # 16 sequences over a horizon of 16: the error itself, at most 0.2 either way.
    assert found == pytest.approx([1.2, 1.1, 0.8], rel=1e-3)
