"""Facts about the comparison of learner and generators on fixed tokens, before the first step and
after pushes.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np
import pytest
from composing import compose

from async_rl.core.types import FloatArray
from async_rl.protocol.generator import Logprobs, Probe
from async_rl.protocol.weights import Manifest, TensorEntry
from async_rl.training.operations import Score
from async_rl.training.probe import Expected, Prober, followed_share, probe_rows


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


def test_rounding_is_reported_and_passes() -> None:
    problem, metrics = check(5e-4)
    assert problem == ""
    assert metrics["weights/probe_abs_max"] == pytest.approx(5e-4, rel=1e-3)


@pytest.mark.parametrize("difference", [0.01, -3.0, float("nan")])
def test_a_larger_difference_is_a_problem_with_its_likely_causes(difference: float) -> None:
    problem, _ = check(difference)
    assert re.match(
        r"generator-0 and the learner disagree by .* on version 0, .*likely causes: .*dtype",
        problem,
    )


def test_rounding_of_bfloat16_is_no_difference_but_other_weights_are_one() -> None:
    # One improbable token of SmolLM2-135M is 0.77 nats off, the mean of the 64 is 0.096.
    problem, metrics = check(0.77, "model.dtype=bfloat16")
    assert problem == ""
    assert metrics["weights/probe_abs_max"] == pytest.approx(0.77)
    assert metrics["weights/probe_abs_mean"] == pytest.approx(0.77 / 64)
    problem, _ = check(0.31 * 64, "model.dtype=bfloat16")
    assert re.search(r"0\.31 nats \(mean token .*with model\.dtype=bfloat16 at most 0\.3", problem)
    assert "disagree by nan" in check(float("nan"), "model.dtype=bfloat16")[0]


def test_a_quantized_engine_may_differ_as_one_of_bfloat16() -> None:
    quantized = "generation.vllm.extra=['kv_cache_dtype=fp8']"
    assert check(0.77, quantized)[0] == ""
    assert "kv_cache_dtype=fp8 at most 0.3" in check(0.31 * 64, quantized)[0]
    # An engine without the setting is exact.
    assert check(0.77, quantized, "generation.engine=hf")[0]


def test_an_answer_of_another_version_is_not_compared() -> None:
    assert "weights/probe_abs_max" not in check(9.0, version=1)[1]


def test_the_probe_is_the_same_in_every_run() -> None:
    assert all(np.array_equal(a, b) for a, b in zip(probe_rows(50), probe_rows(50), strict=True))
    assert len({int(t) for row in probe_rows(50) for t in row}) > 25


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
    probed: dict[tuple[str, int], list[int]] = {}
    short: dict[tuple[str, int], list[int]] = {}

    class Generator:
        def __init__(self, life: tuple[str, int]) -> None:
            self.life = life

        async def call(self, request: Probe, *, timeout_s: float) -> Logprobs:
            assert timeout_s == 120, "twice the time of a push"
            kind = probed if len(request.rows) > 1 else short
            kind.setdefault(self.life, []).append(prober.expected.version)
            rows = [np.full(len(row), -pool.num_calls, np.float32) for row in request.rows]
            return Logprobs(version=prober.expected.version, rows=rows)

    async def push(version: int) -> None:
        await prober.expect(pool, manifest(version))
        lives = [("a", 1)]
        if version >= 4:
            lives.append(("b", 1 if version == 4 else 2))
        for life in lives:
            await prober.probe(Generator(life), life, prober.expected)

    for version in range(8):
        await push(version)
    assert probed == {
        ("a", 1): due,
        ("b", 1): [4],
        ("b", 2): [5, *(version for version in due if version > 5)],
    }
    others = sorted(set(range(8)) - set(due)) if every else []
    assert short.get(("a", 1), []) == others
    assert short.get(("b", 2), []) == [version for version in others if version > 5]


@pytest.mark.parametrize(("engine_changes", "expected"), [(True, 1.0), (False, 0.0)])
def test_the_change_of_log_probs_shows_old_weights_that_the_tolerance_does_not(
    engine_changes: bool, expected: float
) -> None:
    rng = np.random.default_rng(0)
    before = rng.normal(-3.0, 1.0, 64).astype(np.float32)
    # One step at a small learning rate, ten times below the tolerance of float32.
    after = before + rng.normal(0.0, 1e-4, 64).astype(np.float32)
    # The engine is off by a constant of its own, and by a rounding error of each call.
    offset = rng.normal(0.0, 5e-4, 64)
    rounded = [rng.normal(0.0, 1e-5, 64) for _ in range(2)]
    old = (before + offset + rounded[0]).astype(np.float32)
    new = ((after if engine_changes else before) + offset + rounded[1]).astype(np.float32)
    share, error = followed_share((old, before), (new, after))
    assert share == pytest.approx(expected, abs=0.06)
    assert error is not None
    assert error < 0.03


def test_the_share_is_the_slope_of_the_tokens_that_both_probes_have_and_has_its_error() -> None:
    zeros = np.zeros(4, np.float32)
    engine = np.array([2.0, 2.0, 0.0, 0.0, 9.0], np.float32)
    # The slope 4 / 4 leaves residuals of 1: the error is 2 / sqrt(4 x 3).
    found = followed_share((zeros, zeros), (engine, np.ones(5, np.float32)))
    assert found == pytest.approx((1.0, 3**-0.5))


def test_without_a_change_of_the_learner_nothing_is_followed() -> None:
    same = np.full(64, -1.0, np.float32)
    assert followed_share((same, same), (same, same)) == (None, None)
