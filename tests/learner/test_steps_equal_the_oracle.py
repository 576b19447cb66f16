"""Every update of a second step, at the minibatches, epochs and masks of each preset and on
conversations of several turns, has the gradient of a float64 oracle.

One minibatch of responses without foreign tokens hides much: log-probs that only the first
minibatch has, statistics over tokens that nobody trains, terms that are 0 while policy and
reference are one.
"""

from pathlib import Path

import pytest
from learner_support import make_groups, make_trainer, relative_difference, spy_on_gradients
from step_oracle import Objective, StepOracle, conversations, record_updates
from tables import table

HALVES, TWICE = (table(__file__, name) for name in ("halves", "twice"))
"""Small passes: no update depends on how its sequences are packed."""
CASES = {
    case["settings"].replace("$TWICE", TWICE).replace("$HALVES", HALVES): case
    for case in table(__file__, "cases")
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
    "clip_ratio, eps_clip",
    "cliprange_value",
    "decoupled objective",
    "early_stop_imp_ratio",
    "entropy_coeff",
    "gamma, lam",
    "kl_coef in the reward",
    "mask_too_long",
    "masks inside a response",
    "ppo_epochs",
    "ref_ema_eta off",
    "values of truncated responses",
)
@pytest.mark.parametrize("case", CASES)
def test_every_update_of_a_step_has_the_gradient_of_the_oracle(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    objective, num_updates = Objective(**CASES[case]["objective"]), CASES[case]["updates"]
    conf, *overrides = case.split()
    rates = ["learner.optimizer.lr=3e-3"]
    if conf == "ppo_code":
        rates.append("algorithm.advantage.critic.lr=3e-3")
    trainer = make_trainer(model_path, conf, *overrides, *rates)
    # After one step the policy differs from its reference, and values from 0.
    trainer.step(conversations(make_groups(size=2), trainer), 0)
    ages = (0,) if "max_staleness_versions=0" in case else (0, 1)
    groups = conversations(make_groups(1, size=3, version=1, ages=ages), trainer)
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


@pytest.mark.proves("learner.minibatches")
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
    kl = StepOracle(
        model_path, groups, updates[0], Objective(**CASES["ppo_code"]["objective"])
    ).kl_per_sequence()
    assert kl > 0.01
    target = f"algorithm.kl.controller.target={kl / 1.1}"
    again = make_trainer(model_path, "ppo_code", *knobs, target)
    again.step(conversations(make_groups(), again), 0)
    before, after = (again.step(groups, 1).scalars["policy/kl_coef"] for _ in range(2))
    # 16 sequences over a horizon of 16: the error itself.
    assert after / before == pytest.approx(1.1, rel=1e-3)
