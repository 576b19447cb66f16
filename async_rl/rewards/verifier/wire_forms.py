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
from dataclasses import field
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from async_rl.core.frozen import frozen
from async_rl.core.languages import PYTHON
from async_rl.core.types import StdinTest, Verdict
from async_rl.rewards.verifier.service import Refused, VerifierService
from async_rl.rewards.verifier.wire_areal import (
    ArealCall,
    ArealFunction,
    areal_call,
    areal_function,
)
from async_rl.rewards.verifier.wire_requests import Body, Timeout, memory_mb_of, program_request

R = TypeVar("R", bound=msgspec.Struct)


@frozen
class Form(Generic[R]):
    """One route of another system.

    answer: checks the request (raises Refused) and returns the work to do once it is admitted.
    statuses: HTTP statuses of this server that the client knows by another number.
    """

    path: str
    request: type[R]
    answer: Callable[[VerifierService, R], Callable[[], Awaitable[msgspec.Struct]]]
    statuses: Mapping[int, int] = field(default_factory=dict)


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
    """The end of a process. stderr: the exception without its traceback, or the compiler's text."""

    status: Literal["Finished", "TimeLimitExceeded"]
    execution_time: float
    return_code: int | None
    stdout: str
    stderr: str


class RunCodeAnswer(Body):
    """Answer of SandboxFusion: Success if the program exited with status 0."""

    status: Literal["Success", "Failed"]
    message: str
    run_result: RunResult | None
    compile_result: RunResult | None = None
    executor_pod_name: None = None
    files: dict[str, str] = msgspec.field(default_factory=dict)


def _run_code(service: VerifierService, body: RunCode) -> Callable[[], Awaitable[RunCodeAnswer]]:
    stdin = StdinTest(input=body.stdin or "", output="")
    request = program_request(
        body.code,
        lambda: [stdin],
        language=body.language,
        timeout_s=body.run_timeout,
        memory_mb=memory_mb_of(body.memory_limit_mb),
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


FORMS: tuple[Form[Any], ...] = (
    Form(
        path="/hapis/faas.hcs.io/v1/functions/realhf_code_verify/invoke",
        request=ArealFunction,
        answer=areal_function,
    ),
    Form(path="/apis/functioncalls", request=ArealCall, answer=areal_call),
    # SandboxFusion's clients retry after a 504 and give up after any other error.
    Form(path="/run_code", request=RunCode, answer=_run_code, statuses={429: 504, 503: 504}),
)
