"""Stock clients of other systems get right verdicts from a live server; what cannot be done is
refused; failures are theirs to retry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import httpx
import pytest
from language_support import Languages
from tables import table
from test_languages import SQUARES
from verifier_support import TOKEN, verifier
from wire_clients import PROGRAMS, SUMS, ArealCallClient, ArealFunctionClient, SandboxFusionClient

from async_rl.rewards.verifier.service import VerifierService

T = TypeVar("T")
SPIN = "while True: pass"


def with_server(
    work: Callable[[str, httpx.Client], T],
    *,
    closed: bool = False,
    before: Callable[[VerifierService], None] | None = None,
) -> T:
    """Run a blocking client in a thread against a live server; closed: one whose jail is gone."""

    async def run() -> T:
        async with verifier() as (url, service):
            if closed:
                await service.cells.close()
            if before is not None:
                before(service)
            with httpx.Client(timeout=60) as http:
                return await asyncio.to_thread(work, f"{url}/token/{TOKEN}", http)

    return asyncio.run(run())


@pytest.mark.covers("FUNCTIONCALL_SERVICE_DOMAIN: served")
def test_areal_function_client_gets_right_verdicts() -> None:
    def work(base: str, http: httpx.Client) -> dict[str, bool]:
        client = ArealFunctionClient(base, http)
        return {name: client.is_right(problem, code) for name, problem, code, _ in PROGRAMS}

    assert with_server(work) == {name: is_right for name, _, _, is_right in PROGRAMS}


def test_areal_function_answers_with_codes_up_to_the_first_failure() -> None:
    def work(base: str, http: httpx.Client) -> list[Any]:
        client = ArealFunctionClient(base, http)
        codes = [
            "a, b = map(int, input().split())\nprint(a + abs(b))",
            "def f(:",
            "print(1 // 0)",
            "a, b = map(int, input().split())\nassert a != 3\nprint(a + b)",
        ]
        return [client.send(SUMS, code)["result"] for code in codes]

    assert with_server(work) == [[True, True, False], [-2], [-1], [True, -1]]


def test_areal_call_client_gets_right_verdicts_one_test_at_a_time_and_all_at_once() -> None:
    def work(base: str, http: httpx.Client) -> list[dict[str, bool]]:
        clients = ArealCallClient(base, http), ArealCallClient(base, http, batch=10)
        return [
            {name: client.is_right(problem, code) for name, problem, code, _ in PROGRAMS}
            for client in clients
        ]

    assert with_server(work) == [{name: is_right for name, _, _, is_right in PROGRAMS}] * 2


def test_areal_call_names_the_error_and_stops_only_if_told() -> None:
    cases = [
        {"input": i, "expectedOutput": o}
        for i, o in (("1", "1"), ("2", "5"), ("0", "0"), ("3", "3"))
    ]
    code = "x = int(input())\nprint(x if x else 1 // x)"

    def work(base: str, http: httpx.Client) -> list[Any]:
        client = ArealCallClient(base, http)
        return [
            [r["errorType"] for r in client.send(cases, code, isFastFail=fast)["results"]]
            for fast in (True, False)
        ] + [client.send(cases, code)["uid"]]

    assert with_server(work) == [
        ["", "WrongAnswer"],
        ["", "WrongAnswer", "RuntimeError", ""],
        "[q-1]-[0-1]",
    ]


def test_sandbox_fusion_client_gets_right_verdicts() -> None:
    def work(base: str, http: httpx.Client) -> list[bool | int]:
        client = SandboxFusionClient(f"{base}/run_code", http)
        return [
            client.status(code, SUMS["inputs"][2], SUMS["outputs"][2])
            for _, problem, code, _ in PROGRAMS
            if problem is SUMS
        ]

    assert with_server(work) == [True, False, -2, -2, False]


def test_run_code_tells_output_status_and_exception() -> None:
    def work(base: str, http: httpx.Client) -> list[dict[str, Any]]:
        client = SandboxFusionClient(f"{base}/run_code", http)
        return [
            client.send(code, "5\n", run_timeout=0.3)
            for code in (
                "print(int(input()) * 2)",
                "print('so far', flush=True)\nraise KeyError('x')",
                SPIN,
            )
        ]

    well, failed, late = with_server(work)
    assert (well["status"], well["run_result"]["stdout"], well["run_result"]["return_code"]) == (
        "Success",
        "10\n",
        0,
    )
    assert (failed["status"], failed["run_result"]["status"], failed["run_result"]["stdout"]) == (
        "Failed",
        "Finished",
        "so far\n",
    )
    assert "KeyError" in failed["run_result"]["stderr"]
    assert failed["run_result"]["return_code"] == 1
    assert (late["status"], late["run_result"]["status"]) == ("Failed", "TimeLimitExceeded")


@pytest.mark.covers("infrastructure failures")
def test_infrastructure_failure_is_retried_by_every_client_and_never_an_answer() -> None:
    def work(base: str, http: httpx.Client) -> list[int]:
        form_a, form_b = ArealFunctionClient(base, http), ArealCallClient(base, http)
        with pytest.raises(RuntimeError, match="HTTP 504"):
            form_a.send(SUMS, "print(1)")
        with pytest.raises(RuntimeError, match="SystemError"):
            form_b.send([{"input": "", "expectedOutput": ""}], "print(1)")
        with pytest.raises(RuntimeError, match="still 504"):
            SandboxFusionClient(f"{base}/run_code", http).send("print(1)", "")
        return [form_a.num_calls, form_b.num_calls]

    assert with_server(work, closed=True) == [5, 5]


def test_full_queue_is_what_each_client_comes_back_for() -> None:
    def fill(service: VerifierService) -> None:
        service.admit(service.queue_size + service.num_cells)

    def work(base: str, http: httpx.Client) -> list[int]:
        stdin_case = {"code": "print(1)", "testcases": [{"input": "", "expectedOutput": "1"}]}
        bodies = [
            ("/apis/functioncalls", stdin_case),
            ("/run_code", {"code": "print(1)", "language": "python"}),
        ]
        return [http.post(base + path, json=body).status_code for path, body in bodies]

    assert with_server(work, before=fill) == [504, 504]


@pytest.mark.parametrize("case", table(__file__, "refused"), ids=lambda case: case["said"])
def test_what_cannot_be_done_is_refused_with_the_path_of_the_field(case: dict[str, Any]) -> None:
    def work(base: str, http: httpx.Client) -> tuple[int, str]:
        answer = http.post(base + case["path"], json=case["body"])
        return answer.status_code, answer.json()["error"]

    status, error = with_server(work)
    assert status == 400
    assert case["said"] in error


def test_token_in_the_path_must_be_the_right_one() -> None:
    def work(base: str, http: httpx.Client) -> list[int]:
        wrong = [
            base.replace(TOKEN, "other"),
            base.replace(f"/token/{TOKEN}", ""),
            base.replace(TOKEN, ""),
        ]
        return [http.post(f"{url}/apis/functioncalls", json={}).status_code for url in wrong]

    assert with_server(work) == [401, 401, 401]


def test_every_form_judges_other_languages(languages: Languages) -> None:
    """In C, which compiles quickest."""
    languages.need("c")
    right, wrong, broken = SQUARES["c"], "int main(void) { return 0; }", "int main(void) {"

    def work(base: str, http: httpx.Client) -> list[Any]:
        areal, cases = ArealCallClient(base, http), [{"input": "3", "expectedOutput": "9"}]
        pairs = {"inputs": ["3"], "outputs": ["9"]}
        function = ArealFunctionClient(base, http)
        fusion = SandboxFusionClient(f"{base}/run_code", http)
        own = {"language": "c", "tests": [{"kind": "stdin", "input": "3", "output": "9"}]}
        return [
            *(areal.send(cases, code, language="C")["success"] for code in (right, wrong)),
            *(
                function.send(pairs, code, language="c")["result"]
                for code in (right, wrong, broken)
            ),
            *(
                http.post(f"{base}/verify", json={**own, "code": code}).json()["verdict"]
                for code in (right, wrong, broken)
            ),
            fusion.send(right, "3", language="c")["run_result"]["stdout"],
            fusion.send(broken, "3", language="c"),
        ]

    said = with_server(work)
    assert said[:2] == [True, False]
    assert said[2:5] == [[True], [False], [-2]]
    assert said[5:8] == ["pass", "wrong_answer", "compile_error"]
    assert said[8] == "9"
    failed = said[9]
    assert (failed["status"], failed["run_result"]) == ("Failed", None)
    assert "expected declaration or statement" in failed["compile_result"]["stderr"]
    assert failed["compile_result"]["return_code"] == 1


def test_language_without_a_compiler_is_refused_by_every_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = {"input": "", "output": "1"}

    def work(base: str, http: httpx.Client) -> list[httpx.Response]:
        monkeypatch.setenv("PATH", "/nowhere")
        bodies = {
            "/verify": {"code": "1", "language": "go", "tests": [{"kind": "stdin", **case}]},
            "/run_code": {"code": "1", "language": "go"},
            "/apis/functioncalls": {
                "code": "1", "language": "GO", "testcases": [{"input": "", "expectedOutput": "1"}],
            },
        }  # fmt: skip
        batch = {"requests": [bodies["/verify"]]}
        return [
            *(http.post(base + path, json=body) for path, body in bodies.items()),
            http.post(f"{base}/verify_batch", json=batch),
        ]

    *refused, in_batch = with_server(work)
    for answer in refused:
        assert answer.status_code == 400
        assert "need go, which is not on the PATH" in answer.json()["error"]
        assert "$.language" in answer.json()["error"]
    response = in_batch.json()["response"]
    assert response["verdict"] == "infrastructure_error"
    assert "need go, which is not on the PATH" in response["failure"]
