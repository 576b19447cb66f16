"""AReaL's requests: its code function and its function calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

from msgspec import Meta

from async_rl.core.io_pairs import pair_test, read_input_output
from async_rl.core.languages import PYTHON
from async_rl.core.types import CodeTest, Verdict
from async_rl.rewards.verifier.service import Refused, VerifierService
from async_rl.rewards.verifier.wire_requests import Body, Timeout, memory_mb_of, program_request


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


def areal_function(
    service: VerifierService, body: ArealFunction
) -> Callable[[], Awaitable[ArealFunctionResult]]:
    """Check a request of the code function; return the work to do once it is admitted."""
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


def areal_call(
    service: VerifierService, body: ArealCall
) -> Callable[[], Awaitable[ArealCallAnswer]]:
    """Check a request of the function calls; return the work to do once it is admitted."""

    def tests() -> list[CodeTest]:
        return [
            pair_test(
                case.input,
                case.expected_output,
                body.entry_function,
                origins=(f"$.testcases[{index}].input", f"$.testcases[{index}].expectedOutput"),
            )
            for index, case in enumerate(body.testcases)
        ]

    request = program_request(
        body.code,
        tests,
        language=body.language,
        timeout_s=body.timeout,
        memory_mb=memory_mb_of(body.memory),
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
