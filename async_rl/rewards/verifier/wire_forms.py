"""Requests and answers of other systems' verifiers, so that their clients can use this one
unchanged.

- AReaL's code function: {problem: {input_output}, code, language, timeout} -> {result: [true |
  false | -1 | -2], metadata}; stops at a failure.
- AReaL's function calls: {uid, code, entryFunction, testcases: [{input, expectedOutput}], ...} ->
  {uid, success, results}.
- SandboxFusion's /run_code for standard input: {code, stdin, run_timeout} -> {status, run_result:
  {status, stdout, return_code}}; its client compares.
Invariants: an infrastructure failure is an answer that the client retries (a 503, errorType
SystemError, a 504), never one that it scores. Fields without a meaning here are ignored, as in the
originals; a request that cannot be served (an unknown language, remote tests, files) is a 400.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from async_rl.core.errors import DataError
from async_rl.core.io_pairs import pair_test, read_input_output
from async_rl.core.languages import LANGUAGES, PYTHON, language_of
from async_rl.core.types import CodeTest, StdinTest, Verdict
from async_rl.rewards.verifier.protocol import (
    MAX_MEMORY_MB,
    MAX_TIMEOUT_S,
    MIN_MEMORY_MB,
    VerifyRequest,
)
from async_rl.rewards.verifier.service import Refused, VerifierService

Timeout = Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)]
R = TypeVar("R", bound=msgspec.Struct)


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Base of requests and answers: unknown fields are ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form(Generic[R]):
    """One route of another system.

    answer: checks the request (raises Refused) and returns the work to do once it is admitted.
    statuses: HTTP statuses of this server that the client knows by another number.
    """

    path: str
    request: type[R]
    answer: Callable[[VerifierService, R], Callable[[], Awaitable[msgspec.Struct]]]
    statuses: Mapping[int, int] = field(default_factory=dict)


class ArealProblem(Body):
    """The tests of a problem, in the form of its data."""

    input_output: Any


class ArealFunction(Body):
    """Request of AReaL's code function."""

    problem: ArealProblem
    code: str
    language: str = PYTHON
    timeout: Timeout | None = None


class ArealFunctionResult(Body):
    """Answer of AReaL's code function.

    result: per test up to the first failure true, false, -1 (error, limit) or -2 (no compile).
    """

    result: list[bool | int]
    metadata: dict[str, str]


_AREAL_CODES: dict[Verdict, bool | int] = {
    Verdict.PASS: True,
    Verdict.WRONG_ANSWER: False,
    Verdict.COMPILE_ERROR: -2,
}


def _areal_function(
    service: VerifierService, body: ArealFunction
) -> Callable[[], Awaitable[ArealFunctionResult]]:
    request = program_request(
        body.code,
        lambda: read_input_output("$.problem", body.problem.input_output),
        language=body.language,
        timeout_s=body.timeout,
        stop_at_first_failure=True,
    )

    async def work() -> ArealFunctionResult:
        await service.require(request)
        response = await service.verify(request)
        last = response.tests[-1]
        if not response.verdict.is_score:
            raise Refused(503, f"this program could not be judged: {last.message}")
        return ArealFunctionResult(
            result=[_AREAL_CODES.get(test.verdict, -1) for test in response.tests],
            metadata={"verdict": response.verdict.value, "message": last.message},
        )

    return work


class ArealTestCase(Body, rename="camel"):
    """One pair of input and output."""

    input: str
    expected_output: str


class ArealCall(Body, rename="camel"):
    """Request of AReaL's calls. timeout: s per test; memory: MB, 0 for the server's limit."""

    code: str
    testcases: Annotated[list[ArealTestCase], Meta(min_length=1, max_length=1000)]
    uid: Any = ""
    language: str = PYTHON
    entry_function: str = ""
    is_fast_fail: bool = True
    is_remote: Literal[False] = False
    timeout: Timeout | None = None
    memory: Annotated[float, Meta(ge=0)] = 0


class ArealCallResult(Body, rename="camel"):
    """The result of one test."""

    success: bool
    reason: str
    error_type: str


class ArealCallAnswer(Body):
    """Answer of AReaL's function calls: success if every test passes."""

    uid: Any
    success: bool
    results: list[ArealCallResult]


_ERROR_TYPES = {
    Verdict.PASS: "",
    Verdict.WRONG_ANSWER: "WrongAnswer",
    Verdict.RUNTIME_ERROR: "RuntimeError",
    Verdict.TIMEOUT: "TimeLimitExceeded",
    Verdict.MEMORY: "MemoryLimitExceeded",
    Verdict.OUTPUT_LIMIT: "OutputLimitExceeded",
    Verdict.COMPILE_ERROR: "CompileError",
    Verdict.TEST_ERROR: "SystemError",
    Verdict.INFRASTRUCTURE_ERROR: "SystemError",
}


def _areal_call(
    service: VerifierService, body: ArealCall
) -> Callable[[], Awaitable[ArealCallAnswer]]:
    def tests() -> list[CodeTest]:
        return [
            pair_test(
                case.input,
                case.expected_output,
                body.entry_function,
                places=(f"$.testcases[{index}].input", f"$.testcases[{index}].expectedOutput"),
            )
            for index, case in enumerate(body.testcases)
        ]

    request = program_request(
        body.code,
        tests,
        language=body.language,
        timeout_s=body.timeout,
        memory_mb=_memory_mb(body.memory),
        stop_at_first_failure=body.is_fast_fail,
    )

    async def work() -> ArealCallAnswer:
        await service.require(request)
        response = await service.verify(request)
        results = [
            ArealCallResult(
                success=test.verdict is Verdict.PASS,
                reason=test.message,
                error_type=_ERROR_TYPES[test.verdict],
            )
            for test in response.tests
        ]
        is_pass = response.verdict is Verdict.PASS
        return ArealCallAnswer(uid=body.uid, success=is_pass, results=results)

    return work


class RunCode(Body, rename={"memory_limit_mb": "memory_limit_MB"}):
    """Request of SandboxFusion. memory_limit_mb: below 1 for the limit of the server."""

    code: str
    language: str
    stdin: str | None = None
    run_timeout: Timeout | None = None
    memory_limit_mb: float = -1
    files: Annotated[dict[str, Any], Meta(max_length=0)] | None = None
    fetch_files: Annotated[list[Any], Meta(max_length=0)] | None = None


class RunResult(Body):
    """How a process ended. stderr: the exception without its traceback, or the compiler's text."""

    status: Literal["Finished", "TimeLimitExceeded"]
    execution_time: float
    return_code: int | None
    stdout: str
    stderr: str


class RunCodeAnswer(Body):
    """Answer of SandboxFusion: Success if the program ended with status 0."""

    status: Literal["Success", "Failed"]
    message: str
    run_result: RunResult | None
    compile_result: RunResult | None = None
    executor_pod_name: None = None
    files: dict[str, str] = {}


def _run_code(service: VerifierService, body: RunCode) -> Callable[[], Awaitable[RunCodeAnswer]]:
    stdin = StdinTest(input=body.stdin or "", output="")
    request = program_request(
        body.code,
        lambda: [stdin],
        language=body.language,
        timeout_s=body.run_timeout,
        memory_mb=_memory_mb(body.memory_limit_mb),
    )

    async def work() -> RunCodeAnswer:
        await service.require(request)
        printed = await service.run(request, stdin.input)
        if printed.verdict is Verdict.INFRASTRUCTURE_ERROR:
            raise Refused(504, f"this program could not be judged: {printed.message}")
        is_late, is_success = printed.verdict is Verdict.TIMEOUT, printed.verdict is Verdict.PASS
        result = RunResult(
            status="TimeLimitExceeded" if is_late else "Finished",
            execution_time=printed.wall_s,
            return_code=None if is_late else int(not is_success),
            stdout=printed.output,
            stderr=printed.message,
        )
        if printed.verdict is Verdict.COMPILE_ERROR and request.language != PYTHON:
            return RunCodeAnswer(
                status="Failed", message="", run_result=None, compile_result=result
            )
        return RunCodeAnswer(
            status="Success" if is_success else "Failed",
            message="" if is_success else printed.verdict.value,
            run_result=result,
        )

    return work


def _memory_mb(given: float) -> int | None:
    return min(max(int(given), MIN_MEMORY_MB), MAX_MEMORY_MB) if given >= 1 else None


def program_request(
    code: str,
    tests: Callable[[], list[CodeTest]],
    *,
    language: str = PYTHON,
    timeout_s: float | None,
    memory_mb: int | None = None,
    stop_at_first_failure: bool | None = None,
) -> VerifyRequest:
    """A request with these tests. Raises Refused if they are malformed or there are none, or if the
    language is unknown.
    """
    known = language_of(language)
    if known is None:
        raise Refused(
            400,
            f"bad request: language {language[:40]!r} is not one of {', '.join(LANGUAGES)} - at"
            " `$.language`",
        )
    try:
        given = tests()
    except DataError as error:
        raise Refused(400, f"bad request: {error}") from error
    if not given:
        raise Refused(
            400, "bad request: no tests, so every program would pass - at `$.problem.input_output`"
        )
    try:
        return VerifyRequest(
            code=code,
            tests=given,
            language=known,
            timeout_s=timeout_s,
            memory_mb=memory_mb,
            stop_at_first_failure=stop_at_first_failure,
        )
    except ValueError as error:
        raise Refused(400, f"bad request: {error}") from error


FORMS: tuple[Form[Any], ...] = (
    Form(
        path="/hapis/faas.hcs.io/v1/functions/realhf_code_verify/invoke",
        request=ArealFunction,
        answer=_areal_function,
    ),
    Form(path="/apis/functioncalls", request=ArealCall, answer=_areal_call),
    # SandboxFusion's clients retry after a 504 and give up after any other error.
    Form(path="/run_code", request=RunCode, answer=_run_code, statuses={429: 504, 503: 504}),
)
