"""Facts about the comparison of learner and generators on fixed tokens, before the first step and
after pushes.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from composing import compose

from async_rl.core.errors import WeightsError
from async_rl.core.types import FloatArray
from async_rl.protocol.generator import Logprobs, Probe
from async_rl.protocol.weights import Manifest, TensorEntry
from async_rl.training.operations import Score
from async_rl.training.probe import Expected, Prober, probe_rows


def check(difference: float, *overrides: str, version: int = 0) -> dict[str, float]:
    """Compares a generator that is `difference` off in one token of one row."""
    rows = probe_rows(50)
    expected = [np.zeros(len(row), np.float32) for row in rows]
    answer = [row.copy() for row in expected]
    answer[-1][-1] += difference
    config = compose("grpo_code", list(overrides))
    prober = Prober(config.weights, dtype=config.model.dtype, push_s=60)
    own = Expected(version=0, is_due=True, rows=rows, logprobs=expected)
    prober.compare(("generator-0", 7), Logprobs(version=version, rows=answer), own)
    return prober.metrics


def test_rounding_is_reported_and_passes() -> None:
    assert check(5e-4)["weights/probe_abs_max"] == pytest.approx(5e-4, rel=1e-3)


@pytest.mark.parametrize("difference", [0.01, -3.0, float("nan")])
def test_a_larger_difference_ends_the_run_with_its_likely_causes(difference: float) -> None:
    with pytest.raises(
        WeightsError,
        match=(
            r"generator-0 and the learner disagree by .* on version 0, .*likely causes: .*dtype"
        ),
    ):
        check(difference)


def test_rounding_of_bfloat16_is_no_difference_but_other_weights_are_one() -> None:
    # One improbable token of SmolLM2-135M is 0.77 nats off, the mean of the 64 is 0.096.
    metrics = check(0.77, "model.dtype=bfloat16")
    assert metrics["weights/probe_abs_max"] == pytest.approx(0.77)
    assert metrics["weights/probe_abs_mean"] == pytest.approx(0.77 / 64)
    refused = r"0\.31 nats \(mean token .*with model\.dtype=bfloat16 at most 0\.3"
    with pytest.raises(WeightsError, match=refused):
        check(0.31 * 64, "model.dtype=bfloat16")
    with pytest.raises(WeightsError, match="disagree by nan"):
        check(float("nan"), "model.dtype=bfloat16")


def test_an_answer_of_another_version_is_not_compared() -> None:
    assert "weights/probe_abs_max" not in check(9.0, version=1)


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
def test_a_generator_is_probed_at_its_first_load_and_every_so_many_pushes(
    every: int, due: list[int]
) -> None:
    """Another one joins at push 4, and is restarted as another process at push 5."""
    weights = compose("grpo_code", [f"weights.probe_every_pushes={every}"]).weights
    prober = Prober(weights, dtype="float32", push_s=60)
    pool: Any = Pool()
    probed: dict[tuple[str, int], list[int]] = {}

    class Generator:
        async def call(self, request: Probe, *, timeout_s: float) -> Logprobs:
            rows = [np.full(len(row), -pool.num_calls, np.float32) for row in request.rows]
            return Logprobs(version=prober.expected.version, rows=rows)

    async def push(version: int) -> None:
        await prober.expect(pool, manifest(version))
        lives = [("a", 1)]
        if version >= 4:
            lives.append(("b", 1 if version == 4 else 2))
        for life in lives:
            answer = await prober.ask(Generator(), life, prober.expected)
            prober.compare(life, answer, prober.expected)
            if answer is not None:
                probed.setdefault(life, []).append(version)

    async def pushes() -> None:
        for version in range(8):
            await push(version)

    asyncio.run(pushes())
    assert probed == {
        ("a", 1): due,
        ("b", 1): [4],
        ("b", 2): [5, *(version for version in due if version > 5)],
    }
