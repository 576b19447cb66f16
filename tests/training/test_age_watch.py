"""The learner warns of old data before it collapses, once, and says so in its activity."""

import logging

import pytest

from async_rl.training.mismatch import AgeWatch

LOG = logging.getLogger("learner")
FP8 = "kv_cache_dtype=fp8"


def scalars(share: float, scale: float = 1.0) -> dict[str, float]:
    return {"policy/effective_sequences": share, "policy/step_scale": scale}


def warnings(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == level]


def test_old_data_that_lasts_is_reported_once_with_its_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Long before nothing counts any more; one bad batch is not reported."""
    caplog.set_level(logging.INFO)
    watch = AgeWatch(LOG)
    for step in range(1, 11):
        watch.observe(step, scalars(0.6))
    watch.observe(11, scalars(0.05))
    for step in range(12, 16):
        watch.observe(step, scalars(0.2))
    assert warnings(caplog) == []
    for step in range(16, 26):
        watch.observe(step, scalars(0.2, 0.45))  # at 16: 4 x 0.6, 0.05, 5 x 0.2
    for step in range(26, 46):
        watch.observe(step, scalars(0.9 if step < 36 else 0.2))
    first, second = warnings(caplog)
    assert first.startswith("step 16: its batch is worth 34.5% of its sequences, below 35%")
    assert "multiplied by 0.45" in first
    assert "lower buffer.max_staleness_versions" in first
    assert second.startswith("step 43: "), "after the data were young again"
    assert warnings(caplog, logging.INFO) == ["step 28: 41% of its sequences count again"]


@pytest.mark.parametrize(
    ("quantization", "mismatch", "kind"),
    [
        (FP8, {"mismatch/engine_abs_mean": 0.2}, "quantized engine"),
        (FP8, {"weights/probe_abs_mean": 0.2, "mismatch/stale_abs_mean": 0.3}, "quantized engine"),
        # Most of the difference came with the age.
        (FP8, {"weights/probe_abs_mean": 0.2, "mismatch/stale_abs_mean": 0.5}, "old data"),
        ("", {"mismatch/engine_abs_mean": 0.2}, "old data"),
    ],
)
def test_a_quantized_engine_is_named_if_it_makes_most_of_the_difference(
    quantization: str, mismatch: dict[str, float], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    watch = AgeWatch(LOG, quantization=quantization)
    watch.observe(1, scalars(0.2) | mismatch)
    (warning,) = warnings(caplog)
    assert watch.stage.startswith(f"training: {kind}, 20%")
    remedy = "generation.vllm.extra=kv_cache_dtype=fp8 changes the engine's log-probs by 0.2 nats"
    assert (remedy in warning) == (kind != "old data")
    assert ("algorithm.policy_loss.correction=token_tis" in warning) == (kind != "old data")
