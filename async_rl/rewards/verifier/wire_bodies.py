"""Bodies of requests and answers of other systems' verifiers, and AReaL's codes for verdicts.

`wire.py` reads and answers them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from async_rl.core.languages import PYTHON
from async_rl.core.types import CodeTest, Verdict
from async_rl.rewards.verifier.protocol import MAX_TIMEOUT_S

Timeout = Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)]


AREAL_CODES: dict[Verdict, bool | int] = {
    Verdict.PASS: True,
    Verdict.WRONG_ANSWER: False,
    Verdict.COMPILE_ERROR: -2,
}
AREAL_ERROR_TYPES = {
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


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Base of requests and answers: unknown fields are ignored."""


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
    files: dict[str, str] = {}


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


class RewardQuery(Body):
    """Request of OpenRLHF. query: prompt and response; labels: the tests of each, as JSON."""

    query: list[str]
    prompts: list[str]
    labels: list[str]


class Rewards(Body):
    """Answer of OpenRLHF: the share of passed tests of each query."""

    rewards: list[float]
    scores: list[float]
    extra_logs: dict[str, float] = {}


class Label(Body):
    """The tests of a query of OpenRLHF, unless they are pairs of input and output."""

    tests: list[CodeTest] = []
    test_list: list[str] = []
    setup: str = ""
