"""The learner warns of old data before it collapses, once, and says so in its activity."""

from __future__ import annotations

import logging

import pytest

from async_rl.config.policy_losses import EffectiveStepScale, NoStepScale
from async_rl.training.age_watch import AgeWatch

LOG = logging.getLogger("learner")
CONTROLLED = EffectiveStepScale(kind="effective_sequences", bound=0.5)


def scalars(share: float, scale: float = 1.0) -> dict[str, float]:
    return {"policy/effective_sequences": share, "policy/step_scale": scale}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_a_burst_of_old_data_is_reported_once_with_its_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = AgeWatch(CONTROLLED, LOG)
    for step, share in enumerate((0.9, 0.2, 0.1, 0.3, 0.8, 0.2), start=1):
        watch.observe(step, scalars(share, (min(1.0, share / 0.5)) ** 0.5))
    first, second = warnings(caplog)
    assert first.startswith("step 2: its batch is worth 20.0% of its sequences, below 50%")
    assert "multiplied by 0.63" in first
    assert "lower buffer.max_staleness_versions" in first
    assert second.startswith("step 6")


def test_the_activity_of_the_learner_names_the_lowered_step() -> None:
    watch = AgeWatch(CONTROLLED, LOG)
    watch.observe(1, scalars(0.125, 0.5))
    assert watch.stage == "training: old data, 12% of the sequences count, step x 0.50"
    watch.observe(2, scalars(0.9))
    assert watch.stage == "training"


UNBOUNDED = EffectiveStepScale(kind="effective_sequences", bound=1.0)


@pytest.mark.parametrize("settings", [NoStepScale(kind="none"), UNBOUNDED])
def test_without_a_bound_the_mean_of_ten_steps_is_watched(
    caplog: pytest.LogCaptureFixture, settings: NoStepScale | EffectiveStepScale
) -> None:
    """Old data that lasts is reported long before nothing counts any more; one bad batch is not."""
    watch = AgeWatch(settings, LOG)
    for step in range(1, 11):
        watch.observe(step, scalars(0.6))
    watch.observe(11, scalars(0.05))
    for step in range(12, 16):
        watch.observe(step, scalars(0.2))
    assert warnings(caplog) == []
    watch.observe(16, scalars(0.2))  # 4 x 0.6, 0.05, 5 x 0.2
    assert [text.partition(":")[0] for text in warnings(caplog)] == ["step 16"]


def test_steps_that_train_only_the_critic_are_no_reason_to_warn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = AgeWatch(CONTROLLED, LOG)
    watch.observe(1, scalars(0.0, 0.0))
    assert (warnings(caplog), watch.stage) == ([], "training")
