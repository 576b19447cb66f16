"""A push reaches every generator or says which it did not reach, and why; one that hangs does not hold up the others."""

from __future__ import annotations

import asyncio

from async_rl.errors import Unavailable
from async_rl.messages import LoadReport, LoadWeights, Manifest
from async_rl.weights.push import PushResult, push

MANIFEST = Manifest(version=3, path="/nowhere", tensors=[], total_bytes=0, checksum=0)


class Loads:
    """Loads at once; notes when others had finished."""

    def __init__(self, version: int = 3) -> None:
        self._version = version

    async def call(self, request: LoadWeights, timeout_s: float) -> LoadReport:
        return LoadReport(version=self._version, load_s=0.2, pause_s=0.1)


class Fails:
    async def call(self, request: LoadWeights, timeout_s: float) -> LoadReport:
        raise Unavailable("the generator is gone")


class Hangs:
    def __init__(self) -> None:
        self.is_cancelled = False

    async def call(self, request: LoadWeights, timeout_s: float) -> LoadReport:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.is_cancelled = True
        raise AssertionError


def result_of(**generators: Loads | Fails | Hangs) -> PushResult:
    return asyncio.run(push(MANIFEST, generators, deadline_s=0.05))


def test_all_reports_come_back_by_name() -> None:
    result = result_of(a=Loads(), b=Loads())
    assert sorted(result.reports) == ["a", "b"]
    assert result.reports["a"].pause_s == 0.1
    assert result.failures == {}


def test_a_generator_that_fails_is_named_with_its_error() -> None:
    result = result_of(a=Loads(), b=Fails())
    assert list(result.reports) == ["a"]
    assert result.failures == {"b": "Unavailable: the generator is gone"}


def test_a_generator_that_hangs_is_cut_off_at_the_deadline() -> None:
    hangs = Hangs()
    result = result_of(a=Loads(), b=hangs)
    assert list(result.reports) == ["a"]
    assert result.failures["b"] == "DeadlineExceeded: version 3 was not loaded within 0.05 s (weights.deadline_s)"
    assert hangs.is_cancelled


def test_a_generator_that_loaded_another_version_has_failed() -> None:
    result = result_of(a=Loads(version=2))
    assert result.reports == {}
    assert result.failures == {"a": "WeightsError: it loaded version 2 instead of 3"}


def test_a_push_to_nobody_is_done() -> None:
    assert result_of() == PushResult(reports={}, failures={})
