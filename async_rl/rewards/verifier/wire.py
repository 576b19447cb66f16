"""Requests and answers of other systems' verifiers, so that their clients can use this one
unchanged: AReaL's two forms and SandboxFusion's form.

Invariants: an infrastructure failure is an answer that the client retries (errorType
SystemError, a 504), never an answer that it scores. Fields without a meaning here are ignored, as
in the originals; a request that cannot be served (an unknown language, remote tests, files) is a
400.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta
from starlette.exceptions import HTTPException

from async_rl.core.errors import at
from async_rl.core.frozen import Value
from async_rl.core.io_pairs import pair_test, read_input_output
from async_rl.core.programs import LANGUAGES, PYTHON, language_of
from async_rl.core.types import CodeTest, StdinTest, Verdict
from async_rl.rewards.verifier.protocol import (
    MAX_MEMORY_MB,
    MIN_MEMORY_MB,
    Timeout,
    VerifyRequest,
)
from async_rl.rewards.verifier.service import VerifierService

Reply = dict[str, Any]
"""The JSON object that a client reads; nothing here reads it again."""
_AREAL_CODES: dict[Verdict, bool | int] = {
    Verdict.PASS: True,
    Verdict.WRONG_ANSWER: False,
    Verdict.COMPILE_ERROR: -2,
}
"""AReaL's codes for verdicts; any other verdict, an error or a limit, is -1."""
_AREAL_ERROR_TYPES = {
    Verdict.PASS: "",
    Verdict.WRONG_ANSWER: "WrongAnswer",
    Verdict.RUNTIME_ERROR: "RuntimeError",
    Verdict.TIMEOUT: "TimeLimitExceeded",
    Verdict.MEMORY: "MemoryLimitExceeded",
    Verdict.OUTPUT_LIMIT: "OutputLimitExceeded",
    Verdict.COMPILE_ERROR: "CompileError",
    # AReaL's client retries after this type instead of scoring the program.
    Verdict.TEST_ERROR: "SystemError",
    Verdict.INFRASTRUCTURE_ERROR: "SystemError",
}


class Part(Value, forbid_unknown_fields=False):
    """Base of the parts of requests: unknown fields are ignored."""


class Body(Part, kw_only=True):
    """Base of requests."""

    code: str
    language: str = PYTHON

    def request(
        self,
        tests: list[CodeTest],
        *,
        timeout_s: float | None,
        memory_mb: float = 0,
        stops: bool = True,
    ) -> VerifyRequest:
        """The program with these tests. memory_mb: the server's limit if below 1. Raises ValueError
        if there are no tests, or if the language is unknown.
        """
        known = language_of(self.language)
        if known is None:
            raise ValueError(
                f"language {self.language[:40]!r} is not one of {', '.join(LANGUAGES)} - at"
                " `$.language`"
            )
        if not tests:
            raise ValueError("no tests, so every program would pass - at `$.problem.input_output`")
        # Clients of other systems name limits beyond those of this server without meaning them.
        memory = min(max(int(memory_mb), MIN_MEMORY_MB), MAX_MEMORY_MB) if memory_mb >= 1 else None
        return VerifyRequest(
            code=self.code,
            tests=tests,
            language=known,
            timeout_s=timeout_s,
            memory_mb=memory,
            stop_at_first_failure=stops,
        )


class ArealProblem(Part):
    """The tests of a problem, in the form of its data."""

    input_output: Any


class ArealFunction(Body):
    """AReaL's code function; stops at a failure."""

    problem: ArealProblem
    timeout: Timeout | None = None

    def program(self) -> VerifyRequest:
        """The program with the tests of the problem."""
        with at("$.problem"):
            tests = read_input_output(self.problem.input_output)
        return self.request(tests, timeout_s=self.timeout)

    async def answer(self, service: VerifierService, program: VerifyRequest) -> Reply:
        """One code per test up to the first failure: true, false, -1 (error, limit) or -2 (no
        compile).
        """
        response = await service.verify(program)
        message = response.tests[-1].message
        if response.verdict is Verdict.INFRASTRUCTURE_ERROR:
            raise HTTPException(503, f"the program could not be judged: {message}")
        return {
            "result": [_AREAL_CODES.get(test.verdict, -1) for test in response.tests],
            "metadata": {"verdict": response.verdict, "message": message},
        }


class ArealTestCase(Part, rename="camel"):
    """One pair of input and output."""

    input: str
    expected_output: str


class ArealCall(Body, rename="camel"):
    """AReaL's function calls. timeout: s per test; memory: MB, 0 for the server's limit."""

    testcases: Annotated[list[ArealTestCase], Meta(min_length=1, max_length=1000)]
    uid: Any = ""
    entry_function: str = ""
    is_fast_fail: bool = True
    # Remote tests are files that only AReaL's own service can read.
    is_remote: Literal[False] = False
    timeout: Timeout | None = None
    memory: Annotated[float, Meta(ge=0)] = 0

    def program(self) -> VerifyRequest:
        """The program with one test per case."""
        tests = []
        for index, case in enumerate(self.testcases):
            with at(f"$.testcases[{index}]"):
                tests.append(pair_test(case.input, case.expected_output, self.entry_function))
        return self.request(
            tests, timeout_s=self.timeout, memory_mb=self.memory, stops=self.is_fast_fail
        )

    async def answer(self, service: VerifierService, program: VerifyRequest) -> Reply:
        """Success if every test passes, with one result per test."""
        response = await service.verify(program)
        results = [
            {
                "success": test.verdict is Verdict.PASS,
                "reason": test.message,
                "errorType": _AREAL_ERROR_TYPES[test.verdict],
            }
            for test in response.tests
        ]
        is_pass = response.verdict is Verdict.PASS
        return {"uid": self.uid, "success": is_pass, "results": results}


class RunCode(Body, rename={"memory_limit_mb": "memory_limit_MB"}):
    """SandboxFusion's run of one standard input, whose output the client compares.

    memory_limit_mb: below 1 for the limit of the server.
    """

    language: str
    stdin: str | None = None
    run_timeout: Timeout | None = None
    memory_limit_mb: float = -1
    # Nothing writes files for a program, so a request with files cannot be served.
    files: Annotated[dict[str, Any], Meta(max_length=0)] | None = None
    fetch_files: Annotated[list[Any], Meta(max_length=0)] | None = None

    def program(self) -> VerifyRequest:
        """The program; its test only has the standard input."""
        test = StdinTest(input=self.stdin or "", output="")
        return self.request([test], timeout_s=self.run_timeout, memory_mb=self.memory_limit_mb)

    async def answer(self, service: VerifierService, program: VerifyRequest) -> Reply:
        """The output of the program: Success if it exited with status 0."""
        ran, output = await service.run(program)
        if ran.verdict is Verdict.INFRASTRUCTURE_ERROR:
            raise HTTPException(503, f"this program could not be judged: {ran.message}")
        is_late = ran.verdict is Verdict.TIMEOUT
        is_success = ran.verdict is Verdict.PASS
        result = {
            "status": "TimeLimitExceeded" if is_late else "Finished",
            "execution_time": ran.wall_s,
            "return_code": None if is_late else int(not is_success),
            "stdout": output.decode(errors="replace"),
            # The exception without its traceback, or the text of the compiler.
            "stderr": ran.message,
        }
        # SandboxFusion has no step of compiling for Python: its error is one of the run.
        is_compiled = ran.verdict is not Verdict.COMPILE_ERROR or program.language == PYTHON
        return {
            "status": "Success" if is_success else "Failed",
            "message": ran.verdict if is_compiled and not is_success else "",
            "run_result": result if is_compiled else None,
            "compile_result": None if is_compiled else result,
            "executor_pod_name": None,
            "files": {},
        }


Form = ArealFunction | ArealCall | RunCode
"""`program` returns the program to judge and raises DataError or ValueError if it cannot be judged
here; `answer` judges it once it is admitted, and returns the answer in the form of the client.
"""
FORMS: dict[str, type[Form]] = {
    "/hapis/faas.hcs.io/v1/functions/realhf_code_verify/invoke": ArealFunction,
    "/apis/functioncalls": ArealCall,
    "/run_code": RunCode,
}
