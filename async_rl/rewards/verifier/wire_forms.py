"""Requests and answers of other systems' verifiers, so that their clients get verdicts from this
one unchanged.

- AReaL's code function: {problem: {input_output}, code, timeout} -> {result: [true | false | -1 |
  -2], metadata}; stops at a failure.
- AReaL's function calls: {uid, code, entryFunction, testcases: [{input, expectedOutput}], ...} ->
  {uid, success, results}.
- SandboxFusion's /run_code for standard input: {code, stdin, run_timeout} -> {status, run_result:
  {status, stdout, return_code}}; its client compares.
Invariants: an infrastructure failure is what that client retries (a 503, errorType SystemError, a
504), never something it scores; fields that mean nothing here are ignored, as in the originals, but
what cannot be done (another language, remote tests, files) is a 400. Used by `server.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from async_rl.core.errors import DataError
from async_rl.core.io_pairs import pair_test, read_input_output
from async_rl.core.types import CodeTest, StdinTest, Verdict
from async_rl.rewards.verifier.protocol import (
    MAX_MEMORY_MB,
    MAX_TIMEOUT_S,
    MIN_MEMORY_MB,
    VerifyRequest,
    VerifyResponse,
)
from async_rl.rewards.verifier.service import Refused, VerifierService

Timeout = Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)]
R = TypeVar("R", bound=msgspec.Struct)


class _Form(msgspec.Struct, frozen=True, kw_only=True):
    """Base: unknown fields are ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form(Generic[R]):
    """One foreign route. answer: checks the request (Refused if it cannot be done) and gives what
    does the work once it is admitted.

    status: the HTTP status by which its client knows that it should come back.
    """

    path: str
    request: type[R]
    answer: Callable[[VerifierService, R], Callable[[], Awaitable[msgspec.Struct]]]
    status: Callable[[int], int]


class ArealProblem(_Form):
    """The tests of a problem, as its data has them."""

    input_output: Any


class ArealFunction(_Form):
    """Request of AReaL's code function."""

    problem: ArealProblem
    code: str
    timeout: Timeout | None = None


class ArealFunctionResult(_Form):
    """Its answer. result: true, false, -1 (runtime error or limit) or -2 (does not compile) for
    each test up to the first failure.
    """

    result: list[bool | int]
    metadata: dict[str, str]


_AREAL_CODES: dict[Verdict, bool | int] = {
    Verdict.PASS: True,
    Verdict.WRONG_ANSWER: False,
    Verdict.COMPILE_ERROR: -2,
}


def _areal_function(
    service: VerifierService, asked: ArealFunction
) -> Callable[[], Awaitable[ArealFunctionResult]]:
    request = _request(
        asked.code,
        lambda: read_input_output("$.problem", asked.problem.input_output),
        timeout_s=asked.timeout,
        stop_at_first_failure=True,
    )

    async def work() -> ArealFunctionResult:
        response = await service.verify(request)
        if response.verdict is Verdict.INFRASTRUCTURE_ERROR:
            raise Refused(503, f"nothing is known about this program: {response.tests[0].message}")
        last = response.tests[-1]
        return ArealFunctionResult(
            result=[_AREAL_CODES.get(test.verdict, -1) for test in response.tests],
            metadata={"verdict": response.verdict.value, "message": last.message},
        )

    return work


class ArealTestCase(_Form, rename="camel"):
    """One pair of input and output."""

    input: str
    expected_output: str


class ArealCall(_Form, rename="camel"):
    """Request of AReaL's function calls. timeout: seconds per test; memory: MB, 0 = the server's
    own limit.
    """

    code: str
    testcases: Annotated[list[ArealTestCase], Meta(min_length=1, max_length=1000)]
    uid: Any = ""
    language: Literal["PYTHON", "python"] = "PYTHON"
    entry_function: str = ""
    is_fast_fail: bool = True
    is_remote: Literal[False] = False
    timeout: Timeout | None = None
    memory: Annotated[float, Meta(ge=0)] = 0


class ArealCallResult(_Form, rename="camel"):
    """One test's end."""

    success: bool
    reason: str
    error_type: str


class ArealCallAnswer(_Form):
    """Its answer: success if every test passes."""

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
    Verdict.INFRASTRUCTURE_ERROR: "SystemError",
}


def _areal_call(
    service: VerifierService, asked: ArealCall
) -> Callable[[], Awaitable[ArealCallAnswer]]:
    def tests() -> list[CodeTest]:
        return [
            pair_test(
                case.input,
                case.expected_output,
                asked.entry_function,
                places=(f"$.testcases[{index}].input", f"$.testcases[{index}].expectedOutput"),
            )
            for index, case in enumerate(asked.testcases)
        ]

    request = _request(
        asked.code,
        tests,
        timeout_s=asked.timeout,
        memory_mb=_memory_mb(asked.memory),
        stop_at_first_failure=asked.is_fast_fail,
    )

    async def work() -> ArealCallAnswer:
        response: VerifyResponse = await service.verify(request)
        results = [
            ArealCallResult(
                success=test.verdict is Verdict.PASS,
                reason=test.message,
                error_type=_ERROR_TYPES[test.verdict],
            )
            for test in response.tests
        ]
        return ArealCallAnswer(
            uid=asked.uid, success=response.verdict is Verdict.PASS, results=results
        )

    return work


class RunCode(_Form, rename={"memory_limit_mb": "memory_limit_MB"}):
    """Request of SandboxFusion. memory_limit_mb: below 1 = the server's own limit."""

    code: str
    language: Literal["python"]
    stdin: str | None = None
    run_timeout: Timeout | None = None
    memory_limit_mb: float = -1
    files: Annotated[dict[str, Any], Meta(max_length=0)] | None = None
    fetch_files: Annotated[list[Any], Meta(max_length=0)] | None = None


class RunResult(_Form):
    """How the process ended. stderr: the exception, without its traceback."""

    status: Literal["Finished", "TimeLimitExceeded"]
    execution_time: float
    return_code: int | None
    stdout: str
    stderr: str


class RunCodeAnswer(_Form):
    """Its answer: Success if the program ended with status 0."""

    status: Literal["Success", "Failed"]
    message: str
    run_result: RunResult
    compile_result: None = None
    executor_pod_name: None = None
    files: dict[str, str] = {}


def _run_code(service: VerifierService, asked: RunCode) -> Callable[[], Awaitable[RunCodeAnswer]]:
    stdin = StdinTest(input=asked.stdin or "", output="")
    request = _request(
        asked.code,
        lambda: [stdin],
        timeout_s=asked.run_timeout,
        memory_mb=_memory_mb(asked.memory_limit_mb),
    )

    async def work() -> RunCodeAnswer:
        printed = await service.run(request, stdin.input)
        if printed.verdict is Verdict.INFRASTRUCTURE_ERROR:
            raise Refused(504, f"nothing is known about this program: {printed.message}")
        is_late, is_well = printed.verdict is Verdict.TIMEOUT, printed.verdict is Verdict.PASS
        result = RunResult(
            status="TimeLimitExceeded" if is_late else "Finished",
            execution_time=printed.wall_s,
            return_code=None if is_late else int(not is_well),
            stdout=printed.output,
            stderr=printed.message,
        )
        return RunCodeAnswer(
            status="Success" if is_well else "Failed",
            message="" if is_well else printed.verdict.value,
            run_result=result,
        )

    return work


def _memory_mb(given: float) -> int | None:
    return min(max(int(given), MIN_MEMORY_MB), MAX_MEMORY_MB) if given >= 1 else None


def _request(
    code: str,
    tests: Callable[[], list[CodeTest]],
    *,
    timeout_s: float | None,
    memory_mb: int | None = None,
    stop_at_first_failure: bool | None = None,
) -> VerifyRequest:
    try:
        given = tests()
    except DataError as error:
        raise Refused(400, f"bad request: {error}") from error
    if not given:
        raise Refused(
            400,
            "bad request: there are no tests, so every program would pass - at"
            " `$.problem.input_output`",
        )
    return VerifyRequest(
        code=code,
        tests=given,
        timeout_s=timeout_s,
        memory_mb=memory_mb,
        stop_at_first_failure=stop_at_first_failure,
    )


def _same(status: int) -> int:
    return status


def _gateway(status: int) -> int:
    """SandboxFusion's clients come back after a 504 and give up after anything else."""
    return 504 if status in (429, 503) else status


FORMS: tuple[Form[Any], ...] = (
    Form(
        path="/hapis/faas.hcs.io/v1/functions/realhf_code_verify/invoke",
        request=ArealFunction,
        answer=_areal_function,
        status=_same,
    ),
    Form(path="/apis/functioncalls", request=ArealCall, answer=_areal_call, status=_same),
    Form(path="/run_code", request=RunCode, answer=_run_code, status=_gateway),
)
