"""Stock clients of other systems get right verdicts from a live server; what cannot be done is
refused; failures are theirs to retry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import httpx
import pytest
from rewards_support import Jail
from tables import table
from verifier_support import TOKEN, Served, verifier
from wire_clients import (
    PROGRAMS,
    SUMS,
    ArealCallClient,
    ArealFunctionClient,
    Client,
    SandboxFusionClient,
)

from async_rl.rewards.verifier.service import VerifierService

T = TypeVar("T")
SPIN = "while True: pass"
RIGHT = {name: is_right for name, _, _, is_right in PROGRAMS}


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.base) as made:
        yield made


def with_server(work: Callable[[Client], T], spoil: Callable[[VerifierService], Any]) -> T:
    """Run blocking clients in a thread against a live server of their own that is spoilt first."""

    async def run() -> T:
        async with verifier() as (url, service):
            done = spoil(service)
            if done is not None:
                await done
            with Client(f"{url}/token/{TOKEN}") as client:
                return await asyncio.to_thread(work, client)

    return asyncio.run(run())


def verdicts(client: ArealFunctionClient | ArealCallClient) -> dict[str, bool]:
    return {name: client.is_right(problem, code) for name, problem, code, _ in PROGRAMS}


@pytest.mark.covers("FUNCTIONCALL_SERVICE_DOMAIN: served")
def test_every_stock_client_gets_right_verdicts(client: Client) -> None:
    """AReaL's call client: one test at a time, and all at once."""
    assert verdicts(ArealFunctionClient(client)) == RIGHT
    assert verdicts(ArealCallClient(client)) == RIGHT
    assert verdicts(ArealCallClient(client, batch=10)) == RIGHT
    fusion = SandboxFusionClient(client)
    statuses = [
        fusion.status(code, SUMS["inputs"][2], SUMS["outputs"][2])
        for _, problem, code, _ in PROGRAMS
        if problem is SUMS
    ]
    assert statuses == [True, False, -2, -2, False]


@pytest.mark.parametrize(("code", "codes"), table(__file__, "function_codes"))
def test_areal_function_answers_with_codes_up_to_the_first_failure(
    client: Client, code: str, codes: list[Any]
) -> None:
    assert ArealFunctionClient(client).send(SUMS, code)["result"] == codes


def test_areal_call_names_the_error_and_stops_only_if_told(client: Client) -> None:
    pairs = (("1", "1"), ("2", "5"), ("0", "0"), ("3", "3"))
    cases = [{"input": given, "expectedOutput": output} for given, output in pairs]
    code = "x = int(input())\nprint(x if x else 1 // x)"
    every = ["", "WrongAnswer", "RuntimeError", ""]
    for fast, errors in ((True, every[:2]), (False, every)):
        said = ArealCallClient(client).send(cases, code, isFastFail=fast)
        assert [result["errorType"] for result in said["results"]] == errors
        assert said["uid"] == "[q-1]-[0-1]"


def test_run_code_tells_output_status_and_exception(client: Client) -> None:
    well, failed, late = (
        SandboxFusionClient(client).send(code, "5\n", run_timeout=0.3)
        for code in (
            "print(int(input()) * 2)",
            "print('so far', flush=True)\nraise KeyError('x')",
            SPIN,
        )
    )
    assert (well["status"], well["run_result"]["stdout"]) == ("Success", "10\n")
    assert well["run_result"]["return_code"] == 0
    assert (failed["status"], failed["run_result"]["status"]) == ("Failed", "Finished")
    assert failed["run_result"]["stdout"] == "so far\n"
    assert "KeyError" in failed["run_result"]["stderr"]
    assert failed["run_result"]["return_code"] == 1
    assert (late["status"], late["run_result"]["status"]) == ("Failed", "TimeLimitExceeded")


@pytest.mark.covers("infrastructure failures")
def test_infrastructure_failure_is_retried_by_every_client_and_never_an_answer() -> None:
    def work(client: Client) -> list[int]:
        form_a, form_b = ArealFunctionClient(client), ArealCallClient(client)
        with pytest.raises(RuntimeError, match="HTTP 504"):
            form_a.send(SUMS, "print(1)")
        with pytest.raises(RuntimeError, match="SystemError"):
            form_b.send([{"input": "", "expectedOutput": ""}], "print(1)")
        with pytest.raises(RuntimeError, match="still 504"):
            SandboxFusionClient(client).send("print(1)", "")
        return [form_a.num_calls, form_b.num_calls]

    assert with_server(work, lambda service: service.cells.close()) == [5, 5]


def test_full_queue_is_what_each_client_comes_back_for() -> None:
    cases = [{"input": "", "expectedOutput": "1"}]
    bodies = {
        "/apis/functioncalls": {"code": "print(1)", "testcases": cases},
        "/run_code": {"code": "print(1)", "language": "python"},
    }

    def work(client: Client) -> list[int]:
        return [client.post(path, json=body).status_code for path, body in bodies.items()]

    def fill(service: VerifierService) -> None:
        service.admit(service.queue_size + service.num_cells)

    assert with_server(work, fill) == [504, 504]


@pytest.mark.parametrize("case", table(__file__, "refused"), ids=lambda case: case["said"])
def test_what_cannot_be_done_is_refused_with_the_path_of_the_field(
    client: Client, case: dict[str, Any]
) -> None:
    answer = client.post(case["path"], json=case["body"])
    assert answer.status_code == 400
    assert case["said"] in answer.json()["error"]


def test_token_in_the_path_must_be_the_right_one(client: Client) -> None:
    for path in ("/token/other", "", "/token/"):
        url = client.base.replace(f"/token/{TOKEN}", path)
        answer = httpx.post(f"{url}/apis/functioncalls", json={}, trust_env=False)
        assert answer.status_code == 401


def test_every_form_judges_other_languages(client: Client, jail: Jail) -> None:
    """In C, which compiles quickest."""
    jail.need("c")
    square = '#include <stdio.h>\nint main(void) { int n; scanf("%d", &n); printf("%d", n * n); }'
    cases, pairs = [{"input": "3", "expectedOutput": "9"}], {"inputs": ["3"], "outputs": ["9"]}
    own = {"language": "c", "tests": [{"kind": "stdin", "input": "3", "output": "9"}]}
    for code, success, result, verdict, printed in (
        (square, True, [True], "pass", "9"),
        ("int main(void) { return 0; }", False, [False], "wrong_answer", ""),
        ("int main(void) {", False, [-2], "compile_error", None),
    ):
        assert ArealCallClient(client).send(cases, code, language="C")["success"] is success
        assert ArealFunctionClient(client).send(pairs, code, language="c")["result"] == result
        assert client.post("/verify", json={**own, "code": code}).json()["verdict"] == verdict
        said = SandboxFusionClient(client).send(code, "3", language="c")
        if printed is not None:
            assert said["run_result"]["stdout"] == printed
    assert (said["status"], said["run_result"]) == ("Failed", None)
    assert "expected declaration or statement" in said["compile_result"]["stderr"]
    assert said["compile_result"]["return_code"] == 1


def test_language_without_a_compiler_is_refused_by_every_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stdin = {"kind": "stdin", "input": "", "output": "1"}
    bodies = {
        "/verify": {"code": "1", "language": "go", "tests": [stdin]},
        "/run_code": {"code": "1", "language": "go"},
        "/apis/functioncalls": {
            "code": "1", "language": "GO", "testcases": [{"input": "", "expectedOutput": "1"}],
        },
        "/verify_batch": {
            "requests": [{"code": "1", "language": "go", "tests": [stdin]}],
        },
    }  # fmt: skip

    def work(client: Client) -> list[httpx.Response]:
        return [client.post(path, json=body) for path, body in bodies.items()]

    *refused, in_batch = with_server(work, lambda _: monkeypatch.setenv("PATH", "/nowhere"))
    for answer in refused:
        assert answer.status_code == 400
        assert "need go, which is not on the PATH" in answer.json()["error"]
        assert "$.language" in answer.json()["error"]
    response = in_batch.json()["response"]
    assert response["verdict"] == "infrastructure_error"
    assert "need go, which is not on the PATH" in response["failure"]
