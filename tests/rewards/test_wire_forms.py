"""Requests as the clients of other systems send them, written from the descriptions of their
protocols, get right verdicts from a live server; what cannot be done is refused; a failure has the
form that its client tries again.
"""

import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
from rewards_support import TOKEN, Jail, Served, verifier
from tables import table

from async_rl.rewards.verifier.service import VerifierService

PROBLEMS, PROGRAMS = table(__file__, "problems"), table(__file__, "programs")
FUNCTION = "/hapis/faas.hcs.io/v1/functions/realhf_code_verify/invoke?waitTime=6000&requestId=1"
CALLS = "/apis/functioncalls"
RUN = "/run_code"
SQUARE = '#include <stdio.h>\nint main(void) { int n; scanf("%d", &n); printf("%d", n * n); }'


def function(problem: dict[str, Any], code: str, **more: Any) -> dict[str, Any]:
    """AReaL's code function. Its client tries again after anything but a 200."""
    given = {"problem_id": "q", "input_output": json.dumps(problem), "batche_index": 0}
    rest = {"debug": False, "timeout": 0.5, "query_index": 0}
    return {"problem": given, "code": code, **rest, **more}


def function_call(problem: dict[str, Any], code: str, **more: Any) -> dict[str, Any]:
    """AReaL's function calls. Its client tries again after a SystemError."""
    cases = [
        {"input": given.strip(), "expectedOutput": wanted.strip()}
        for given, wanted in zip(problem["inputs"], problem["outputs"], strict=True)
    ]
    return {
        "uid": "[q-1]-[0-1]", "language": "PYTHON", "runtime": "python-default", "code": code,
        "entryFunction": problem.get("fn_name", ""), "isFastFail": True, "isRemote": False,
        "testcases": cases, "timeout": 0.5, "memory": 0, "query_index": 0, **more,
    }  # fmt: skip


def run(stdin: str, code: str, **more: Any) -> dict[str, Any]:
    """SandboxFusion as verl calls it. Its client tries again after a 504 only."""
    return {
        "compile_timeout": 10, "run_timeout": 0.5, "code": code, "stdin": stdin,
        "memory_limit_MB": 1024, "language": "python", "files": {}, "fetch_files": [], **more,
    }  # fmt: skip


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    """With the token in its path: these clients send no header of ours."""
    with httpx.Client(base_url=served.base, timeout=60, trust_env=False) as made:
        yield made


async def answers_of_spoilt(
    spoil: Callable[[VerifierService], Awaitable[None]], bodies: dict[str, Any]
) -> list[httpx.Response]:
    """What a server of its own answers that was spoilt first."""
    async with verifier() as (url, service):
        await spoil(service)
        async with httpx.AsyncClient(base_url=f"{url}/token/{TOKEN}", timeout=60) as http:
            return [await http.post(path, json=body) for path, body in bodies.items()]


@pytest.mark.covers("FUNCTIONCALL_SERVICE_DOMAIN: served")
@pytest.mark.parametrize("row", PROGRAMS, ids=lambda row: str(row["codes"]))
def test_every_form_judges_a_program(client: httpx.Client, row: dict[str, Any]) -> None:
    problem, code, types = PROBLEMS[row["problem"]], row["code"], row["types"]
    found = client.post(FUNCTION, json=function(problem, code)).json()
    assert found["result"] == row["codes"]
    found = client.post(CALLS, json=function_call(problem, code)).json()
    assert [result["errorType"] for result in found["results"]] == types
    assert (found["success"], found["uid"]) == (not any(types), "[q-1]-[0-1]")
    if "run" in row:
        status, stdout, return_code = row["run"]
        found = client.post(RUN, json=run(problem["inputs"][-1], code)).json()
        ran = found["run_result"]
        assert (found["status"], ran["stdout"], ran["return_code"]) == (status, stdout, return_code)
        is_late = row["codes"] == [-1] and return_code is None
        assert ran["status"] == ("TimeLimitExceeded" if is_late else "Finished")
        assert ("KeyError" in ran["stderr"]) is ("KeyError" in code)


@pytest.mark.covers("infrastructure failures")
async def test_infrastructure_failure_is_never_an_answer_and_the_client_tries_again() -> None:
    problem = PROBLEMS["sums"]
    bodies = {
        FUNCTION: function(problem, "print(1)"),
        CALLS: function_call(problem, "print(1)"),
        RUN: run("", "print(1)"),
    }
    first, second, third = await answers_of_spoilt(lambda service: service.cells.close(), bodies)
    assert first.status_code == third.status_code == 504
    assert [result["errorType"] for result in second.json()["results"]] == ["SystemError"]

    async def fill(service: VerifierService) -> None:
        service.admit(service.queue_size + service.num_cells)

    assert [answer.status_code for answer in await answers_of_spoilt(fill, bodies)] == [504] * 3


@pytest.mark.parametrize("case", table(__file__, "refused"), ids=lambda case: case["said"])
def test_what_cannot_be_done_is_refused_with_the_path_of_the_field(
    client: httpx.Client, case: dict[str, Any]
) -> None:
    answer = client.post(case["path"], json=case["body"])
    assert answer.status_code == 400
    assert case["said"] in answer.json()["error"]


def test_every_form_judges_other_languages(client: httpx.Client, jail: Jail) -> None:
    """In C, which compiles quickest."""
    jail.need("c")
    pairs = {"inputs": ["3"], "outputs": ["9"]}
    for code, success, result in (SQUARE, True, True), ("int main(void) {", False, -2):
        found = client.post(CALLS, json=function_call(pairs, code, language="C")).json()
        assert found["success"] is success
        found = client.post(FUNCTION, json=function(pairs, code, language="c")).json()
        assert found["result"] == [result]
    found = client.post(RUN, json=run("3", SQUARE, language="c")).json()
    assert found["run_result"]["stdout"] == "9"
    found = client.post(RUN, json=run("3", code, language="c")).json()
    assert (found["status"], found["run_result"]) == ("Failed", None)
    assert "expected declaration or statement" in found["compile_result"]["stderr"]
    assert found["compile_result"]["return_code"] == 1


async def test_a_program_without_its_compiler_is_refused_or_unjudged_in_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def spoil(_: VerifierService) -> None:
        monkeypatch.setenv("PATH", "/nowhere")

    test = {"kind": "stdin", "input": "", "output": "1"}
    own = {"code": "1", "language": "go", "tests": [test]}
    bodies = {"/verify": own, "/verify_batch": {"requests": [own]}}
    refused, in_batch = await answers_of_spoilt(spoil, bodies)
    assert refused.status_code == 400
    assert refused.json()["error"].endswith(" - at `$.language`")
    response = in_batch.json()["response"]
    assert response["verdict"] == "infrastructure_error"
    assert "need go, which is not on the PATH" in response["failure"]
