"""Facts about the comparison of learner and generators on fixed tokens, before the first step and
after pushes, and about the warning of old data.
"""

import asyncio
import logging
import re
from typing import Any

import numpy as np
import pytest
from composing import compose

from async_rl.core.types import FloatArray
from async_rl.protocol.generator import Logprobs, Probe
from async_rl.protocol.weights import Manifest, TensorEntry
from async_rl.training.mismatch import AgeWatch, Expected, Prober, followed_share, probe_rows
from async_rl.training.operations import Score

BFLOAT16 = ["model.dtype=bfloat16"]
KV = "kv_cache_dtype=fp8"
FP8 = ["generation.vllm.extra=['kv_cache_dtype=fp8']"]


def check(difference: float, *overrides: str, version: int = 0) -> tuple[str, dict[str, float]]:
    """Compares a generator that is `difference` off in one token of one row."""
    rows = probe_rows(50)
    expected = [np.zeros(len(row), np.float32) for row in rows]
    answer = [row.copy() for row in expected]
    answer[-1][-1] += difference
    config = compose("grpo_code", list(overrides))
    prober = Prober(config)
    own = Expected(version=0, is_due=True, rows=rows, logprobs=expected)

    class Generator:
        async def call(self, request: Probe, *, timeout_s: float) -> Logprobs:
            return Logprobs(version=version, rows=answer)

    probed = asyncio.run(prober.probe(Generator(), ("generator-0", 7), own))
    return ("" if probed is None else probed.problem), prober.metrics


@pytest.mark.parametrize(
    ("overrides", "passes", "differs", "told"),
    [
        # One improbable token of SmolLM2-135M is 0.77 nats off, the mean of the 64 is 0.096.
        ([], 5e-4, 0.01, ".*likely causes: .*dtype"),
        ([], 5e-4, -3.0, ".*likely causes: .*dtype"),
        (BFLOAT16, 0.77, 0.31 * 64, r"0\.31 nats \(mean token .*=bfloat16 at most 0\.3"),
        (FP8, 0.77, 0.31 * 64, ".*kv_cache_dtype=fp8 at most 0.3"),
        # An engine without the setting is exact.
        ([*FP8, "generation.engine=hf"], 5e-4, 0.77, ""),
    ],
)
def test_rounding_is_reported_and_passes_and_a_larger_difference_has_its_likely_causes(
    overrides: list[str], passes: float, differs: float, told: str
) -> None:
    problem, metrics = check(passes, *overrides)
    assert problem == ""
    assert metrics["weights/probe_abs_max"] == pytest.approx(passes, rel=1e-3)
    assert metrics["weights/probe_abs_mean"] == pytest.approx(passes / 64, rel=1e-3)
    problem, _ = check(differs, *overrides)
    assert re.match(f"generator-0 and the learner disagree by {told}", problem)
    assert "disagree by nan" in check(float("nan"), *overrides)[0]


def test_an_answer_of_another_version_is_not_compared() -> None:
    assert "weights/probe_abs_max" not in check(9.0, version=1)[1]


class Pool:
    """A learner whose log-probs are its number of calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def lead(self, operation: Score) -> list[FloatArray]:
        self.num_calls += 1
        return [np.full(len(row), -self.num_calls, np.float32) for row in operation.rows]


def manifest(version: int) -> Manifest:
    entry = TensorEntry(
        name="model.embed_tokens.weight", dtype="float32", shape=[50, 8], offset=0, size_bytes=1600
    )
    return Manifest(version=version, path="", tensors=[entry], total_bytes=1600, checksum=0)


@pytest.mark.proves("weights.probe_every_pushes")
@pytest.mark.parametrize(("every", "due"), [(3, [0, 3, 6]), (1, list(range(8))), (0, [0])])
async def test_a_generator_is_probed_at_its_first_load_and_every_so_many_pushes(
    every: int, due: list[int]
) -> None:
    """Another one joins at push 4, and is restarted as another process at push 5. One row is
    probed in between, unless the probes are off.
    """
    prober = Prober(compose("grpo_code", [f"weights.probe_every_pushes={every}"]))
    pool: Any = Pool()
    probed: list[tuple[str, int]] = []

    class Generator:
        def __init__(self, life: tuple[str, int]) -> None:
            self.name = f"{life[0]}{life[1]}{{}}"

        async def call(self, request: Probe, *, timeout_s: float) -> Logprobs:
            assert timeout_s == 120, "twice the time of a push"
            version = prober.expected.version
            probed.append((self.name.format("" if len(request.rows) > 1 else " short"), version))
            rows = [np.full(len(row), -pool.num_calls, np.float32) for row in request.rows]
            return Logprobs(version=version, rows=rows)

    for version in range(8):
        await prober.expect(pool, manifest(version))
        lives = [("a", 1)]
        if version >= 4:
            lives.append(("b", 1 if version == 4 else 2))
        for life in lives:
            await prober.probe(Generator(life), life, prober.expected)
    found = {name: [v for other, v in probed if other == name] for name, _ in probed}
    others = sorted(set(range(8)) - set(due)) if every else []
    later = {"b2": [5, *(v for v in due if v > 5)], "b2 short": [v for v in others if v > 5]}
    expected = {"a1": due, "a1 short": others, "b1": [4], **later}
    assert found == {name: versions for name, versions in expected.items() if versions}


def test_the_share_is_the_slope_of_the_tokens_that_both_probes_have_and_has_its_error() -> None:
    """It is 0 for an engine with the old weights, which differ by less than the tolerance."""
    zeros = np.zeros(4, np.float32)
    engine = np.array([2.0, 2.0, 0.0, 0.0, 9.0], np.float32)
    # The slope 4 / 4 leaves residuals of 1: the error is 2 / sqrt(4 x 3).
    found = followed_share((zeros, zeros), (engine, np.ones(5, np.float32)))
    assert found == pytest.approx((1.0, 3**-0.5))
    assert followed_share((zeros, zeros), (zeros, np.ones(4, np.float32))) == (0.0, 0.0)
    assert followed_share((zeros, zeros), (engine, zeros)) == (None, None), "no change to follow"


def scalars(share: float, scale: float = 1.0) -> dict[str, float]:
    return {"policy/effective_sequences": share, "policy/step_scale": scale}


def warnings(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == level]


def test_old_data_that_lasts_is_reported_once_with_its_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Long before nothing counts any more; one bad batch is not reported."""
    caplog.set_level(logging.INFO)
    watch = AgeWatch(logging.getLogger("learner"))
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
        (KV, {"mismatch/engine_abs_mean": 0.2}, "quantized engine"),
        (
            KV,
            {"weights/probe_abs_mean": 0.2, "mismatch/stale_abs_mean": 0.3},
            "quantized engine",
        ),
        # Most of the difference came with the age.
        (
            KV,
            {"weights/probe_abs_mean": 0.2, "mismatch/stale_abs_mean": 0.5},
            "old data",
        ),
        ("", {"mismatch/engine_abs_mean": 0.2}, "old data"),
    ],
)
def test_a_quantized_engine_is_named_if_it_makes_most_of_the_difference(
    quantization: str, mismatch: dict[str, float], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    watch = AgeWatch(logging.getLogger("learner"), quantization=quantization)
    watch.observe(1, scalars(0.2) | mismatch)
    (warning,) = warnings(caplog)
    assert watch.stage.startswith(f"training: {kind}, 20%")
    remedy = "generation.vllm.extra=kv_cache_dtype=fp8 changes the engine's log-probs by 0.2 nats"
    assert (remedy in warning) == (kind != "old data")
    assert ("algorithm.policy_loss.correction=token_tis" in warning) == (kind != "old data")
