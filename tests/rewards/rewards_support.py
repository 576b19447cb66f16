"""A judge in this process with everything that it can have, a verifier on a real socket, and short
ways to ask them.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import pytest
from composing import compose_unchecked
from starlette.types import ASGIApp

from async_rl.config.base import replace
from async_rl.config.rewards import SandboxConfig
from async_rl.config.run import RunConfig
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
from async_rl.observability.activity import Activity
from async_rl.processes import verifier as verifier_main
from async_rl.rewards.scoring import Scorer, VerifierClient
from async_rl.rewards.verifier.judging import Judge
from async_rl.rewards.verifier.protocol import (
    FunctionScores,
    RewardSample,
    TestResult,
    VerifyRequest,
    VerifyResponse,
)
from async_rl.rewards.verifier.reward_process import RewardProcess
from async_rl.rewards.verifier.server import build_app
from async_rl.rewards.verifier.service import VerifierService
from async_rl.sandbox.cells import Cells, Unsafe
from async_rl.wire.http import listen, serving, url_of

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


TOKEN = "secret"


class Served(NamedTuple):
    """A live verifier."""

    url: str
    service: VerifierService

    @property
    def base(self) -> str:
        """The URL for clients that send no header of ours."""
        return f"{self.url}/token/{TOKEN}"


def run_config(*, timeout_s: float = 20.0, mode: str = "all_or_nothing") -> RunConfig:
    """The sections that client and scorer read."""
    settings = [f"timeouts.group_s={4 * timeout_s}", f"reward.mode={mode}"]
    base = compose_unchecked("ppo_code", [*settings, "reward.fail_reward=-1", "verifiers.cells=1"])
    return replace(base, sandbox=LIMITS)


def no_functions() -> RewardProcess:
    """The functions of a configuration that has none."""
    config = run_config()
    return RewardProcess(config.reward, timeouts=config.timeouts)


@contextlib.asynccontextmanager
async def serve(app: ASGIApp) -> AsyncIterator[str]:
    """The application on a loopback port; yields its URL."""
    with listen("127.0.0.1", 0) as listener:
        async with serving(app, listener, close_s=1):
            yield url_of(listener)


@contextlib.asynccontextmanager
async def verifier(
    *, num_cells: int = 1, queue_size: int = 64, queue_timeout_s: float = 30
) -> AsyncIterator[tuple[str, VerifierService]]:
    """A whole verifier: cells, service, socket."""
    async with await Cells.start(num_cells) as cells:
        limits: Any = {"queue_size": queue_size, "queue_timeout_s": queue_timeout_s}
        judge = Judge(cells, LIMITS, num_others=num_cells)
        service = VerifierService(
            cells=cells, judge=judge, functions=no_functions(), num_cells=num_cells, **limits
        )
        try:
            async with serve(build_app(service, TOKEN)) as url:
                yield url, service
        finally:
            await service.judge.close()


@contextlib.asynccontextmanager
async def verifier_process(config: RunConfig) -> AsyncIterator[VerifierClient]:
    """The verifier as a run starts it, with a client; ends it by its own drain. Raises what its
    start raises.
    """
    registered: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def register(address: str) -> None:
        registered.set_result(address)

    context: Any = SimpleNamespace(
        config=config, host="127.0.0.1", token=TOKEN, register=register, stopping=asyncio.Event(),
        activity=Activity(), log=logging.getLogger("verifier"),
    )  # fmt: skip
    process = asyncio.create_task(verifier_main.run(context))
    await asyncio.wait((process, registered), return_when=asyncio.FIRST_COMPLETED)
    if process.done():
        process.result()
    client = VerifierClient(config, TOKEN)
    client.update_servers([registered.result()])
    try:
        yield client
    finally:
        await client.close()
        context.stopping.set()
        await process
