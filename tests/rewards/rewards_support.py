"""A judge in this process with everything that it can have, and short ways to ask it."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest

from async_rl.config.base import replace
from async_rl.config.rewards import SandboxConfig
from async_rl.core.errors import Unsupported
from async_rl.core.types import (
    AssertTest,
    CallTest,
    CodeProblem,
    CodeTest,
    Prompt,
    Score,
    StdinTest,
    Verdict,
)
from async_rl.rewards.scoring import Scorer
from async_rl.rewards.verifier.judging import Judge
from async_rl.rewards.verifier.protocol import (
    FunctionScores,
    RewardSample,
    TestResult,
    VerifyRequest,
    VerifyResponse,
)
from async_rl.sandbox.cell import Work
from async_rl.sandbox.cells import Cells, Unsafe

T = TypeVar("T")
LIMITS = SandboxConfig(
    timeout_s=0.5, memory_mb=128, allow_unsafe=False,
    packages=[], float_tolerance=0,
    checker_headers=None, container_engine=["podman"], rootfs={},
)  # fmt: skip
HEADERS = Path(__file__).with_name("headers")
EVERYTHING = replace(LIMITS, packages=["numpy", "pytest"], checker_headers=str(HEADERS))


def results_with(*verdicts: Verdict) -> list[TestResult]:
    return [TestResult(verdict=verdict, message=verdict) for verdict in verdicts]


def verdicts_of(results: Sequence[TestResult]) -> list[Verdict]:
    return [result.verdict for result in results]


def passed(is_right: bool) -> Verdict:
    return Verdict.PASS if is_right else Verdict.WRONG_ANSWER


async def not_asked(names: Sequence[str], sample: RewardSample) -> FunctionScores:
    """The functions of a configuration that has none."""
    raise AssertionError(names)


def no_sample() -> RewardSample:
    """The sample for functions where no function is asked."""
    raise AssertionError


class Judging:
    """A verifier that decides by a function of a test's number in its problem, the test and the
    program. asked: how many tests of which program.
    """

    def __init__(self, verdict: Callable[[int, CodeTest, str], Verdict]) -> None:
        self._verdict = verdict
        self.asked: list[tuple[int, str]] = []

    async def verify(self, problem: CodeProblem, code: str) -> list[TestResult]:
        self.asked.append((len(problem.tests), code))
        found = [self._verdict(number, test, code) for number, test in enumerate(problem.tests)]
        return results_with(*found)


def prompt_of(*tests: CodeTest, source: str = "code") -> Prompt:
    return Prompt(
        prompt_id="p7", text="", token_ids=np.zeros(1, np.int32), data_source=source,
        problem=CodeProblem(tests=list(tests)),
    )  # fmt: skip


def sample_of(response: str, num_tokens: int = 0, **fields: Any) -> RewardSample:
    made = RewardSample(
        prompt_id="p7", prompt="", response=response, transcript=response,
        token_ids=list(range(num_tokens)), is_written=[True] * num_tokens,
        data_source="code", row={}, tests=[], setup="", is_truncated=False, max_tokens=999,
    )  # fmt: skip
    return msgspec.structs.replace(made, **fields)


def score_steps(
    scorer: Scorer, prompt: Prompt, response: str, sample: Callable[[], RewardSample] = no_sample
) -> Score:
    """One token per character, and one after them."""
    return asyncio.run(
        scorer.score_steps(
            prompt, response, num_tokens=len(response) + 1, tokens_until=lambda chars: chars,
            sample=sample,
        )
    )  # fmt: skip


def as_test(given: CodeTest | tuple[str, str] | str | dict[str, Any]) -> CodeTest:
    """A test as it is, (input, output), the code of an assert test, or an object of JSON."""
    match given:
        case str():
            return AssertTest(code=given)
        case (str() as text, output):
            return StdinTest(input=text, output=output)
        case dict():
            return msgspec.convert(given, CodeTest)
    return given


def calls(*expected: object) -> list[CodeTest]:
    """f(0), f(1), ... with these results."""
    return [CallTest(function="f", args=[i], expected=value) for i, value in enumerate(expected)]


class Jail:
    """Warm cells with their judge on a separate event loop, for tests that are not asynchronous
    themselves. Raises Unsafe.
    """

    def __init__(self, level: int) -> None:
        self._runner = asyncio.Runner()
        self.cells = self._runner.run(Cells.start(1, best_level=level))
        self.judge = Judge(self.cells, EVERYTHING)

    def verify(self, request: VerifyRequest) -> VerifyResponse:
        return self._runner.run(self.judge.verify(request))

    def results(
        self, code: str, tests: Sequence[Any], language: Any = "python", **request: Any
    ) -> list[TestResult]:
        """One result per test, also after a failure. Skips what this machine cannot judge."""
        made = [as_test(test) for test in tests]
        checkers = [test.checker for test in made if isinstance(test, StdinTest)]
        for each in {language, *(checker.language for checker in checkers if checker)}:
            self.need(each)
        given = {"stop_at_first_failure": False, **request}
        return self.verify(VerifyRequest(code=code, tests=made, language=language, **given)).tests

    def result(self, code: str, test: Any, language: Any = "python", **request: Any) -> TestResult:
        return self.results(code, [test], language, **request)[0]

    def verdicts(self, code: str, tests: Sequence[Any], **request: Any) -> list[str]:
        return [str(result.verdict) for result in self.results(code, tests, **request)]

    def need(self, language: str) -> None:
        """Skip the test with the reason why programs in the language cannot be judged here."""
        try:
            if language != "python":
                self.run(self.judge.commands.require(language))
        except Unsupported as error:
            pytest.skip(str(error))

    @contextlib.contextmanager
    def limit_compiler(self, language: str, **limits: Any) -> Iterator[None]:
        """Smaller limits of a compiler, so that hostile sources end soon."""
        self.need(language)
        compiler = self.run(self.judge.commands.require(language))
        before = compiler.row
        assert before.compile is not None
        step = msgspec.structs.replace(before.compile, **limits)
        compiler.row = msgspec.structs.replace(before, compile=step)
        try:
            yield
        finally:
            compiler.row = before

    def contents(self, work: Work) -> list[bytes]:
        """What a cell for commands returns."""
        self.need("c")
        compiler = self.run(self.judge.commands.require("c"))
        return self.run(compiler.cells.run(work)).contents

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(coroutine)

    def close(self) -> None:
        self._runner.run(self.judge.close())
        self._runner.run(self.cells.close())
        self._runner.close()


def opened(level: int) -> Iterator[Jail]:
    """A jail of this level or of the best one below it; skips the test on a machine without it."""
    try:
        made = Jail(level)
    except Unsafe as error:
        pytest.skip(str(error))
    yield made
    made.close()
