from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from async_rl.config.rewards import SandboxConfig
from async_rl.core.types import Verdict
from async_rl.rewards.verifier.judging import Judge
from async_rl.rewards.verifier.protocol import (
    FunctionScores,
    RewardSample,
    TestResult,
    VerifyRequest,
    VerifyResponse,
)
from async_rl.sandbox.cells import Cells

T = TypeVar("T")
LIMITS = SandboxConfig(
    timeout_s=0.5, memory_mb=128, allow_unsafe=False,
    packages=[], float_tolerance=0,
    checker_headers=None, container_engine=["podman"], rootfs={},
)  # fmt: skip


def results_with(*verdicts: Verdict) -> list[TestResult]:
    return [TestResult(verdict=verdict, message=verdict) for verdict in verdicts]


def verdicts_of(results: Sequence[TestResult]) -> list[Verdict]:
    return [result.verdict for result in results]


async def not_asked(names: Sequence[str], sample: RewardSample) -> FunctionScores:
    """The functions of a configuration that has none."""
    raise AssertionError(names)


def no_sample() -> RewardSample:
    """The sample for functions where no function is asked."""
    raise AssertionError


class Jail:
    """Warm cells with their judge on a separate event loop, for tests that are not asynchronous
    themselves.
    """

    def __init__(self, level: int) -> None:
        self._runner = asyncio.Runner()
        self.cells = self._runner.run(Cells.start(1, best_level=level))
        self.judge = Judge(self.cells, LIMITS)

    def verify(self, request: VerifyRequest) -> VerifyResponse:
        return self._runner.run(self.judge.verify(request))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(coroutine)

    def close(self) -> None:
        self._runner.run(self.cells.close())
        self._runner.close()
