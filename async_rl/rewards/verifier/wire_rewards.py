"""Forms of trainers that send tests with each program and expect one number per program or test.

- open-instruct's /test_program: {program, tests, max_execution_time} -> {results: [0 | 1],
  runtimes}, with assert statements, and /test_program_stdio with {input, output} pairs.
- OpenRLHF's remote reward, /get_reward: {query, prompts, labels} -> {rewards, scores, extra_logs}.
  A label is the JSON of {tests, setup}, {test_list} or {inputs, outputs, fn_name}.
Invariants: those of `wire_forms.py`; tests in a pickle are refused, because reading one runs code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from async_rl.core.errors import DataError
from async_rl.core.io_pairs import read_input_output, read_json, read_strings
from async_rl.core.types import AssertTest, CodeTest, StdinTest, Verdict
from async_rl.rewards.extractor import Extractor
from async_rl.rewards.verifier.protocol import VerifyRequest, VerifyResponse
from async_rl.rewards.verifier.service import Refused, VerifierService
from async_rl.rewards.verifier.wire_forms import Form
from async_rl.rewards.verifier.wire_requests import Body, Timeout, program_request


class ProgramTests(Body):
    """Request of open-instruct. tests: a list or its JSON text; max_execution_time: s per test."""

    program: str
    tests: list[Any] | str
    max_execution_time: Timeout = 1.0


class ProgramResults(Body):
    """Answer of open-instruct: 1 for each passed test; the CPU seconds of each, -1 if failed."""

    results: list[int]
    runtimes: list[float]


class Pair(Body):
    """A standard input and the output to print."""

    input: str
    output: str


def _asserts(tests: list[Any]) -> list[CodeTest]:
    return [AssertTest(code=code) for code in read_strings("$.tests", tests)]


def _pairs(tests: list[Any]) -> list[CodeTest]:
    try:
        pairs = msgspec.convert(tests, list[Pair])
    except msgspec.ValidationError as error:
        raise DataError(f"$.tests: {error}") from error
    return [StdinTest(input=pair.input, output=pair.output) for pair in pairs]


def _program_tests(
    read: Callable[[list[Any]], list[CodeTest]],
) -> Callable[[VerifierService, ProgramTests], Callable[[], Awaitable[ProgramResults]]]:
    def tests_of(given: list[Any] | str) -> list[CodeTest]:
        tests = read_json("$.tests (a pickle is refused)", given) if type(given) is str else given
        return read(tests if isinstance(tests, list) else [tests])

    def answer(
        service: VerifierService, body: ProgramTests
    ) -> Callable[[], Awaitable[ProgramResults]]:
        request = program_request(
            body.program,
            lambda: tests_of(body.tests),
            timeout_s=body.max_execution_time,
            stop_at_first_failure=False,
        )

        async def work() -> ProgramResults:
            response = await service.verify(request)
            _require_score(response)
            passed = [test.verdict is Verdict.PASS for test in response.tests]
            passed += [False] * (len(request.tests) - len(passed))
            times = [test.cpu_s for test in response.tests]
            runtimes = [
                cpu_s if is_pass else -1.0 for cpu_s, is_pass in zip(times, passed, strict=False)
            ]
            runtimes += [-1.0] * (len(passed) - len(runtimes))
            return ProgramResults(results=list(map(int, passed)), runtimes=runtimes)

        return work

    return answer


def _require_score(response: VerifyResponse) -> None:
    """Raise Refused if a verdict is about the tests or the machine, not about the program."""
    for test in response.tests:
        if not test.verdict.is_score:
            status = 503 if test.verdict is Verdict.INFRASTRUCTURE_ERROR else 400
            raise Refused(status, f"the program could not be judged: {test.message}")


class RewardQuery(Body):
    """Request of OpenRLHF. query: prompt and response; labels: the tests of each, as JSON."""

    query: list[str]
    prompts: list[str]
    labels: list[str]


class Rewards(Body):
    """Answer of OpenRLHF: the share of passed tests of each query."""

    rewards: list[float]
    scores: list[float]
    extra_logs: dict[str, float] = msgspec.field(default_factory=dict)


class _Label(Body):
    tests: list[CodeTest] = msgspec.field(default_factory=list)
    test_list: list[str] = msgspec.field(default_factory=list)
    setup: str = ""


def _label_request(code: str, origin: str, text: str) -> VerifyRequest:
    def tests() -> list[CodeTest]:
        label = read_json(origin, text)
        if isinstance(label, dict) and "inputs" in label:
            return read_input_output(origin, label)
        return [*given.tests, *(AssertTest(code=test) for test in given.test_list)]

    try:
        given = msgspec.json.decode(text, type=_Label)
    except msgspec.DecodeError as error:
        raise Refused(400, f"bad request: {origin} is not a valid label ({error})") from error
    request = program_request(code, tests, timeout_s=None, stop_at_first_failure=False)
    return msgspec.structs.replace(request, setup=given.setup)


def _get_reward(service: VerifierService, body: RewardQuery) -> Callable[[], Awaitable[Rewards]]:
    if not len(body.query) == len(body.prompts) == len(body.labels):
        raise Refused(400, "bad request: query, prompts and labels differ in length - at `$`")
    responses = [q.removeprefix(p) for q, p in zip(body.query, body.prompts, strict=True)]
    requests = [
        _label_request("", f"$.labels[{index}]", label) for index, label in enumerate(body.labels)
    ]

    async def score(response: str, request: VerifyRequest) -> float:
        extractor = Extractor()
        try:
            code = await extractor.code(response, "auto")
        finally:
            await extractor.close()
        if code is None:
            return 0.0
        answer = await service.verify(msgspec.structs.replace(request, code=code))
        _require_score(answer)
        num_passed = sum(test.verdict is Verdict.PASS for test in answer.tests)
        return num_passed / max(len(answer.tests), len(request.tests))

    async def work() -> Rewards:
        scores = await asyncio.gather(*map(score, responses, requests))
        return Rewards(rewards=scores, scores=scores)

    return work


FORMS: tuple[Form[Any], ...] = (
    Form(path="/test_program", request=ProgramTests, answer=_program_tests(_asserts)),
    Form(path="/test_program_stdio", request=ProgramTests, answer=_program_tests(_pairs)),
    Form(path="/get_reward", request=RewardQuery, answer=_get_reward),
)
