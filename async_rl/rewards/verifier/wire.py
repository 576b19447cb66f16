"""Requests and answers of other systems' verifiers, so that their clients can use this one
unchanged.

- AReaL's code function: {problem: {input_output}, code, language, timeout} -> {result: [true |
  false | -1 | -2], metadata}; stops at a failure.
- AReaL's function calls: {uid, code, entryFunction, testcases: [{input, expectedOutput}], ...} ->
  {uid, success, results}.
- SandboxFusion's /run_code for standard input: {code, stdin, run_timeout} -> {status, run_result:
  {status, stdout, return_code}}; its client compares.
- open-instruct's /test_program: {program, tests, max_execution_time} -> {results: [0 | 1],
  runtimes}, with assert statements, and /test_program_stdio with {input, output} pairs.
- OpenRLHF's remote reward, /get_reward: {query, prompts, labels} -> {rewards, scores, extra_logs}.
  A label is the JSON of {tests, setup}, {test_list} or {inputs, outputs, fn_name}.

Invariants: an infrastructure failure is an answer that the client retries (a 503, errorType
SystemError, a 504), never an answer that it scores. Fields without a meaning here are ignored, as
in the originals; a request that cannot be served (an unknown language, remote tests, files, tests
in a pickle, because reading a pickle runs code) is a 400.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import field
from typing import Any, Generic, TypeVar

import msgspec

from async_rl.core.errors import DataError
from async_rl.core.frozen import frozen
from async_rl.core.io_pairs import pair_test, read_input_output, read_json, read_strings
from async_rl.core.languages import LANGUAGES, PYTHON, language_of
from async_rl.core.types import AssertTest, CodeTest, StdinTest, Verdict
from async_rl.rewards.text_process import TextProcess
from async_rl.rewards.verifier.protocol import (
    MAX_MEMORY_MB,
    MIN_MEMORY_MB,
    VerifyRequest,
    VerifyResponse,
)
from async_rl.rewards.verifier.service import Refused, VerifierService
from async_rl.rewards.verifier.wire_bodies import (
    AREAL_CODES,
    AREAL_ERROR_TYPES,
    ArealCall,
    ArealCallAnswer,
    ArealCallResult,
    ArealFunction,
    ArealFunctionResult,
    Label,
    Pair,
    ProgramResults,
    ProgramTests,
    RewardQuery,
    Rewards,
    RunCode,
    RunCodeAnswer,
    RunResult,
)

R = TypeVar("R", bound=msgspec.Struct)


@frozen
class Form(Generic[R]):
    """One route of another system.

    read: checks the body and returns the programs to judge; raises DataError or Refused. answer:
    judges them once the request is admitted. statuses: HTTP statuses of this server that the client
    knows by another number.
    """

    path: str
    body: type[R]
    read: Callable[[R], list[VerifyRequest]]
    answer: Callable[[VerifierService, R, list[VerifyRequest]], Awaitable[msgspec.Struct]]
    statuses: Mapping[int, int] = field(default_factory=dict)

    def requests(self, body: R) -> list[VerifyRequest]:
        """The programs of a request. Raises Refused if it cannot be served."""
        try:
            return self.read(body)
        except (DataError, ValueError) as error:
            raise Refused(400, f"bad request: {error}") from error


def _request(
    code: str, tests: list[CodeTest], *, language: str = PYTHON, memory_mb: float = 0, **more: Any
) -> VerifyRequest:
    """A request with these tests. memory_mb: the server's limit if below 1. Raises ValueError
    if there are no tests, or if the language is unknown.
    """
    known = language_of(language)
    if known is None:
        raise ValueError(
            f"language {language[:40]!r} is not one of {', '.join(LANGUAGES)} - at `$.language`"
        )
    if not tests:
        raise ValueError("no tests, so every program would pass - at `$.problem.input_output`")
    memory = min(max(int(memory_mb), MIN_MEMORY_MB), MAX_MEMORY_MB) if memory_mb >= 1 else None
    return VerifyRequest(code=code, tests=tests, language=known, memory_mb=memory, **more)


def _require_score(response: VerifyResponse) -> None:
    """Raise Refused if a verdict is about the tests or the machine, not about the program."""
    for test in response.tests:
        if not test.verdict.is_score:
            status = 503 if test.verdict is Verdict.INFRASTRUCTURE_ERROR else 400
            raise Refused(status, f"the program could not be judged: {test.message}")


def _read_areal_function(body: ArealFunction) -> list[VerifyRequest]:
    tests = read_input_output("$.problem", body.problem.input_output)
    return [
        _request(
            body.code,
            tests,
            language=body.language,
            timeout_s=body.timeout,
            stop_at_first_failure=True,
        )
    ]


async def _areal_function(
    service: VerifierService, _: ArealFunction, requests: list[VerifyRequest]
) -> ArealFunctionResult:
    response = await service.verify(requests[0])
    last = response.tests[-1]
    if not response.verdict.is_score:
        raise Refused(503, f"this program could not be judged: {last.message}")
    return ArealFunctionResult(
        result=[AREAL_CODES.get(test.verdict, -1) for test in response.tests],
        metadata={"verdict": response.verdict.value, "message": last.message},
    )


def _read_areal_call(body: ArealCall) -> list[VerifyRequest]:
    tests = [
        pair_test(
            case.input,
            case.expected_output,
            body.entry_function,
            origins=(f"$.testcases[{index}].input", f"$.testcases[{index}].expectedOutput"),
        )
        for index, case in enumerate(body.testcases)
    ]
    return [
        _request(
            body.code,
            tests,
            language=body.language,
            timeout_s=body.timeout,
            memory_mb=body.memory,
            stop_at_first_failure=body.is_fast_fail,
        )
    ]


async def _areal_call(
    service: VerifierService, body: ArealCall, requests: list[VerifyRequest]
) -> ArealCallAnswer:
    response = await service.verify(requests[0])
    results = [
        ArealCallResult(
            success=test.verdict is Verdict.PASS,
            reason=test.message,
            error_type=AREAL_ERROR_TYPES[test.verdict],
        )
        for test in response.tests
    ]
    is_pass = response.verdict is Verdict.PASS
    return ArealCallAnswer(uid=body.uid, success=is_pass, results=results)


def _read_run_code(body: RunCode) -> list[VerifyRequest]:
    stdin = StdinTest(input=body.stdin or "", output="")
    return [
        _request(
            body.code,
            [stdin],
            language=body.language,
            timeout_s=body.run_timeout,
            memory_mb=body.memory_limit_mb,
        )
    ]


async def _run_code(
    service: VerifierService, body: RunCode, requests: list[VerifyRequest]
) -> RunCodeAnswer:
    ran = await service.run(requests[0], body.stdin or "")
    if ran.verdict is Verdict.INFRASTRUCTURE_ERROR:
        raise Refused(504, f"this program could not be judged: {ran.message}")
    is_late, is_success = ran.verdict is Verdict.TIMEOUT, ran.verdict is Verdict.PASS
    result = RunResult(
        status="TimeLimitExceeded" if is_late else "Finished",
        execution_time=ran.wall_s,
        return_code=None if is_late else int(not is_success),
        stdout=ran.output.decode(errors="replace"),
        stderr=ran.message,
    )
    if ran.verdict is Verdict.COMPILE_ERROR and requests[0].language != PYTHON:
        return RunCodeAnswer(status="Failed", message="", run_result=None, compile_result=result)
    if is_success:
        return RunCodeAnswer(status="Success", message="", run_result=result)
    return RunCodeAnswer(status="Failed", message=ran.verdict.value, run_result=result)


def _asserts(tests: list[Any]) -> list[CodeTest]:
    return [AssertTest(code=code) for code in read_strings("$.tests", tests)]


def _pairs(tests: list[Any]) -> list[CodeTest]:
    try:
        pairs = msgspec.convert(tests, list[Pair])
    except msgspec.ValidationError as error:
        raise DataError(f"$.tests: {error}") from error
    return [StdinTest(input=pair.input, output=pair.output) for pair in pairs]


def _read_program_tests(
    read: Callable[[list[Any]], list[CodeTest]],
) -> Callable[[ProgramTests], list[VerifyRequest]]:
    def requests(body: ProgramTests) -> list[VerifyRequest]:
        tests = body.tests
        if isinstance(tests, str):
            tests = read_json("$.tests (a pickle is refused)", tests)
        return [
            _request(
                body.program,
                read(tests if isinstance(tests, list) else [tests]),
                timeout_s=body.max_execution_time,
                stop_at_first_failure=False,
            )
        ]

    return requests


async def _program_tests(
    service: VerifierService, _: ProgramTests, requests: list[VerifyRequest]
) -> ProgramResults:
    response = await service.verify(requests[0])
    _require_score(response)
    # A program that does not compile has one result for all tests.
    num_missing = len(requests[0].tests) - len(response.tests)
    passed = [test.verdict is Verdict.PASS for test in response.tests] + [False] * num_missing
    runtimes = [test.cpu_s if test.verdict is Verdict.PASS else -1.0 for test in response.tests]
    return ProgramResults(results=list(map(int, passed)), runtimes=runtimes + [-1.0] * num_missing)


def _read_label(origin: str, text: str) -> VerifyRequest:
    try:
        given = msgspec.json.decode(text, type=Label)
    except msgspec.DecodeError as error:
        raise DataError(f"{origin} is not a valid label ({error})") from error
    label = read_json(origin, text)
    if isinstance(label, dict) and "inputs" in label:
        tests = read_input_output(origin, label)
    else:
        tests = [*given.tests, *(AssertTest(code=test) for test in given.test_list)]
    return _request("", tests, setup=given.setup, stop_at_first_failure=False)


def _read_rewards(body: RewardQuery) -> list[VerifyRequest]:
    if not len(body.query) == len(body.prompts) == len(body.labels):
        raise ValueError("query, prompts and labels differ in length - at `$`")
    return [_read_label(f"$.labels[{index}]", label) for index, label in enumerate(body.labels)]


async def _rewards(
    service: VerifierService, body: RewardQuery, requests: list[VerifyRequest]
) -> Rewards:
    words = TextProcess()

    async def score(query: str, prompt: str, request: VerifyRequest) -> float:
        code = await words.code(query.removeprefix(prompt), "auto")
        if code is None:
            return 0.0
        response = await service.verify(msgspec.structs.replace(request, code=code))
        _require_score(response)
        num_passed = sum(test.verdict is Verdict.PASS for test in response.tests)
        return num_passed / max(len(response.tests), len(request.tests))

    try:
        scores = await asyncio.gather(*map(score, body.query, body.prompts, requests))
    finally:
        await words.close()
    return Rewards(rewards=scores, scores=scores)


FORMS: tuple[Form[Any], ...] = (
    Form(
        path="/hapis/faas.hcs.io/v1/functions/realhf_code_verify/invoke",
        body=ArealFunction,
        read=_read_areal_function,
        answer=_areal_function,
    ),
    Form(path="/apis/functioncalls", body=ArealCall, read=_read_areal_call, answer=_areal_call),
    Form(
        path="/run_code",
        body=RunCode,
        read=_read_run_code,
        answer=_run_code,
        # SandboxFusion's clients retry after a 504 and give up after any other error.
        statuses={429: 504, 503: 504},
    ),
    Form(
        path="/test_program",
        body=ProgramTests,
        read=_read_program_tests(_asserts),
        answer=_program_tests,
    ),
    Form(
        path="/test_program_stdio",
        body=ProgramTests,
        read=_read_program_tests(_pairs),
        answer=_program_tests,
    ),
    Form(path="/get_reward", body=RewardQuery, read=_read_rewards, answer=_rewards),
)
