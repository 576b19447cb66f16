"""Requests and answers of open-instruct and OpenRLHF, and the paths of all forms.

The invariants of `wire.py` hold here too.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from async_rl.core.errors import DataError, at
from async_rl.core.io_pairs import read_input_output, read_json, read_strings
from async_rl.core.types import AssertTest, CodeTest, StdinTest, Verdict
from async_rl.rewards.text_process import TextProcess
from async_rl.rewards.verifier.protocol import VerifyRequest
from async_rl.rewards.verifier.service import VerifierService
from async_rl.rewards.verifier.wire import (
    ArealCall,
    ArealFunction,
    Body,
    Form,
    Reply,
    RunCode,
    Timeout,
    request_of,
    require_score,
)


class ProgramTests(Form):
    """open-instruct's assert statements, a list or its JSON. max_execution_time: s per test."""

    program: str
    tests: list[Any] | str
    # The default of open-instruct's own server.
    max_execution_time: Timeout = 1.0

    def requests(self) -> list[VerifyRequest]:
        """The program with its tests."""
        tests = self.tests
        if isinstance(tests, str):
            tests = read_json("$.tests (a pickle is refused)", tests)
        read = self._read(tests if isinstance(tests, list) else [tests])
        return [request_of(self.program, read, timeout_s=self.max_execution_time, stops=False)]

    def _read(self, tests: list[Any]) -> list[CodeTest]:
        return [AssertTest(code=code) for code in read_strings("$.tests", tests)]

    async def answer(self, service: VerifierService, requests: list[VerifyRequest]) -> Reply:
        """1 for each passed test and its CPU seconds, 0 and -1 for each failed test."""
        response = await service.verify(requests[0])
        require_score(response)
        num_tests = len(requests[0].tests)
        results, runtimes = [0] * num_tests, [-1.0] * num_tests
        # A program that does not compile has one result for all tests.
        for index, test in enumerate(response.tests):
            if test.verdict is Verdict.PASS:
                results[index] = 1
                runtimes[index] = test.cpu_s
        return {"results": results, "runtimes": runtimes}


class Pair(Body):
    """A standard input and the output to print."""

    input: str
    output: str


class ProgramPairs(ProgramTests):
    """open-instruct's pairs {input, output} of standard input and output."""

    def _read(self, tests: list[Any]) -> list[CodeTest]:
        try:
            pairs = msgspec.convert(tests, list[Pair])
        except msgspec.ValidationError as error:
            raise DataError(f"$.tests: {error}") from error
        return [StdinTest(input=pair.input, output=pair.output) for pair in pairs]


class Label(Body):
    """The tests of a query of OpenRLHF, unless they are pairs of input and output."""

    tests: tuple[CodeTest, ...] = ()
    test_list: tuple[str, ...] = ()
    setup: str = ""


class RewardQuery(Form):
    """OpenRLHF's remote reward. query: prompt and response; labels: the tests of each, the JSON of
    {tests, setup}, {test_list} or {inputs, outputs, fn_name}.
    """

    query: list[str]
    prompts: list[str]
    labels: list[str]

    def requests(self) -> list[VerifyRequest]:
        """One request per label; the program follows with the answer."""
        if not len(self.query) == len(self.prompts) == len(self.labels):
            raise ValueError("query, prompts and labels differ in length - at `$`")
        return [_read_label(f"$.labels[{index}]", label) for index, label in enumerate(self.labels)]

    async def answer(self, service: VerifierService, requests: list[VerifyRequest]) -> Reply:
        """The share of passed tests of each query."""
        words = TextProcess()

        async def score(query: str, prompt: str, request: VerifyRequest) -> float:
            code = await words.code(query.removeprefix(prompt), "auto")
            if code is None:
                return 0.0
            response = await service.verify(msgspec.structs.replace(request, code=code))
            require_score(response)
            return response.share(len(request.tests))

        try:
            scores = await asyncio.gather(*map(score, self.query, self.prompts, requests))
        finally:
            await words.close()
        return {"rewards": scores, "scores": scores, "extra_logs": {}}


FORMS: dict[str, type[Form]] = {
    "/hapis/faas.hcs.io/v1/functions/realhf_code_verify/invoke": ArealFunction,
    "/apis/functioncalls": ArealCall,
    "/run_code": RunCode,
    "/test_program": ProgramTests,
    "/test_program_stdio": ProgramPairs,
    "/get_reward": RewardQuery,
}


def _read_label(origin: str, text: str) -> VerifyRequest:
    label = read_json(origin, text)
    try:
        given = msgspec.convert(label, Label)
    except msgspec.ValidationError as error:
        raise DataError(f"{origin} is not a valid label ({error})") from error
    # Pairs in the layout of data sets; any other label has tests of this verifier or asserts.
    if isinstance(label, dict) and "inputs" in label:
        with at(origin):
            tests = read_input_output(label)
    else:
        tests = [*given.tests, *(AssertTest(code=test) for test in given.test_list)]
    return request_of("", tests, setup=given.setup, stops=False)
