from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from rewards_support import no_sample, prompt_of, verdicts_of
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from verifier_support import TOKEN, Served, run_config, serve, verifier

from async_rl.core.errors import DeadlineExceeded, InfrastructureError, ProtocolError
from async_rl.core.types import CallTest, CodeProblem, Verdict
from async_rl.observability.activity import Activity
from async_rl.rewards.scoring import Scorer
from async_rl.rewards.verifier.client import VerifierClient
from async_rl.rewards.verifier.service import VerifierService

GOOD, BAD = "def f(x):\n    return x * x\n", "def f(x):\n    return x\n"
PROBLEM = CodeProblem(tests=[CallTest(function="f", args=[i], expected=i * i) for i in (1, 2, 3)])
PASSES = [Verdict.PASS] * 3
PROMPT = prompt_of(*PROBLEM.tests)
SLOW = "import time\ntime.sleep(1.2)\n" + GOOD  # longer than five quick ones take
HEADERS = {"authorization": f"Bearer {TOKEN}"}


@asynccontextmanager
async def asked(**options: Any) -> AsyncIterator[tuple[httpx.AsyncClient, VerifierService]]:
    """A verifier and a client of HTTP that has its token."""
    async with (
        asyncio.timeout(60),
        verifier(**options) as (url, service),
        httpx.AsyncClient(base_url=url, headers=HEADERS) as http,
    ):
        yield http, service


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, headers=HEADERS) as client:
        yield client


def _body(code: str = GOOD, **more: Any) -> dict[str, Any]:
    call = {"kind": "call", "function": "f", "args": [3], "expected": 9}
    return {"code": code, "language": "python", "tests": [call], **more}


ENDLESS = _body("while True: pass", timeout_s=100)


def test_verify_answers_in_the_documented_form(http: httpx.Client) -> None:
    def said(*code: str, **more: Any) -> Any:
        return http.post("/verify", json=_body(*code, **more)).json()

    answer = said()
    assert answer["verdict"] == "pass"
    assert set(answer["tests"][0]) == {"verdict", "cpu_s", "wall_s", "memory_mb", "message"}
    assert answer["level"] in (1, 2)
    tests = [
        {"kind": "stdin", "input": "3", "output": "9"},
        {"kind": "assert", "code": "assert f(2) == 4"},
    ]
    answer = said(GOOD + "if __name__ == '__main__': print(f(int(input())))", tests=tests)
    assert [t["verdict"] for t in answer["tests"]] == ["pass", "pass"]
    batch = {"requests": [_body(), _body(BAD)]}
    lines = map(json.loads, http.post("/verify_batch", json=batch).text.splitlines())
    got = {line["index"]: line["response"]["verdict"] for line in lines}
    assert got == {0: "pass", 1: "wrong_answer"}
    health = http.get("/health").json()
    assert (health["status"], health["queued"], health["cells"]) == ("ok", 0, 2)
    # Integers of any size travel in JSON.
    test = {"kind": "call", "function": "f", "args": [2**100], "expected": 2**200}
    assert said(tests=[test])["verdict"] == "pass"
    assert said(tests=[{**test, "expected": 2**200 + 1}])["verdict"] == "wrong_answer"


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"tests": [{"kind": "assert", "code": ""}]}, "code"),
        (_body(tests=[{"kind": "call", "function": "f", "args": 3, "expected": 1}]),
        "$.tests[0].args"),
        (_body(timeout_s=-1), "$.timeout_s"), (_body(wrong=1), "wrong"),
        (_body(language="cobol"), "$.language"), (_body(language="cpp"), "$.tests[0]"),
        (_body(tests=[]), "$.tests"),
        (_body(tests=[{"kind": "eval"}]), "$.tests[0]"),
    ],
)  # fmt: skip
def test_bad_request_is_told_the_path_of_its_field(
    http: httpx.Client, body: dict[str, Any], path: str
) -> None:
    answer = http.post("/verify", json=body)
    assert answer.status_code == 400
    assert path in answer.json()["error"]


@pytest.mark.parametrize("token", [None, "Bearer wrong", TOKEN])
def test_every_route_wants_the_token(served: Served, token: str | None) -> None:
    headers = {} if token is None else {"authorization": token}
    with httpx.Client(base_url=served.url, headers=headers) as http:
        assert http.post("/verify", json=_body()).status_code == 401
        assert http.post("/verify_batch", json={"requests": [_body()]}).status_code == 401
        assert http.get("/health").status_code == 401


def test_unknown_path_is_answered_like_every_other_error(http: httpx.Client) -> None:
    for answer in (http.get("/nowhere"), http.get("/verify")):
        assert answer.status_code in (404, 405)
        assert answer.json().keys() == {"error"}


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110  the other side is a socket away
        await asyncio.sleep(0.01)


async def _left(waiting: list[asyncio.Task[Any]], service: VerifierService) -> None:
    """The clients leave, and take their programs along."""
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await _until(lambda: service.num_admitted == 0)


async def test_full_queue_answers_429_and_a_leaving_client_takes_its_program_along() -> None:
    async with asked(queue_size=1) as (http, service):
        waiting = [asyncio.create_task(http.post("/verify", json=ENDLESS)) for _ in range(2)]
        await _until(lambda: service.num_admitted == 2)
        refused = await http.post("/verify", json=_body())
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        await _left(waiting, service)
        for code in (GOOD, GOOD, BAD, "def f("):
            await http.post("/verify", json=_body(code))
        health = (await http.get("/health")).json()
        assert health["verdicts"] == {"pass": 2, "wrong_answer": 1, "compile_error": 1}
        assert (health["refused"], health["queued"], health["running"]) == (1, 0, 0)
        assert service.cells.num_replaced == 0


async def test_client_that_leaves_a_batch_takes_all_its_programs_along() -> None:
    async with asked(queue_timeout_s=1) as (http, service):
        batch = {"requests": [ENDLESS] * 20}
        waiting = asyncio.create_task(http.post("/verify_batch", json=batch))
        await _until(lambda: service.num_running == 1)
        assert service.health().queued == 19
        # A program that finds no cell in time is an infrastructure error.
        answer = (await http.post("/verify", json=_body())).json()
        assert (answer["verdict"], answer["tests"][0]["message"]) == (
            "infrastructure_error",
            "no cell was free within 1 s; add verifiers or cells",
        )
        await _left([waiting], service)
        assert (await http.post("/verify", json=_body())).json()["verdict"] == "pass"
        assert set(service.health().verdicts) == {Verdict.INFRASTRUCTURE_ERROR, Verdict.PASS}
        assert service.cells.num_replaced == 0


def test_results_of_a_batch_arrive_as_they_finish(http: httpx.Client) -> None:
    batch = {"requests": [_body(SLOW), _body(), _body()]}
    with http.stream("POST", "/verify_batch", json=batch) as answer:
        order = [json.loads(line)["index"] for line in answer.iter_lines()]
    assert order == [1, 2, 0]


async def test_drain_finishes_what_was_admitted_and_refuses_the_rest() -> None:
    async with asked() as (http, service):
        running = asyncio.create_task(http.post("/verify", json=_body(SLOW)))
        await _until(lambda: service.num_admitted == 1)
        draining = asyncio.create_task(service.drain())
        await asyncio.sleep(0)
        assert (await http.post("/verify", json=_body())).status_code == 503
        assert (await running).json()["verdict"] == "pass"
        assert await draining


@asynccontextmanager
async def client_of(*urls: str, **options: Any) -> AsyncIterator[VerifierClient]:
    client = VerifierClient(run_config(**options), TOKEN)
    client.update_servers(urls)
    yield client
    await client.close()


@pytest.mark.covers("score mapping")
@pytest.mark.parametrize(
    ("mode", "expected"),
    [("all_or_nothing", [1.0, -1.0, -1.0, -1.0]), ("fraction", [1.0, -1 / 3, -1.0, -1.0])],
)
async def test_scorer_gives_rewards_by_mode(
    served: Served, mode: str, expected: list[float]
) -> None:
    async with client_of(served.url, mode=mode) as client:
        scorer = Scorer(run_config(mode=mode), client, client.ask_functions)
        texts = [f"Here:\n```python\n{GOOD}```", BAD, "def f(", "```python\nx\n```"]
        scoring = [scorer.score(PROMPT, text, no_sample) for text in texts]
        scores = await asyncio.gather(*scoring)
        assert client.latency_quantile_s(0.5) > 0
    assert [score.reward for score in scores] == pytest.approx(expected)
    assert [score.parts["compiles"] for score in scores] == [1, 1, 0, 0]
    assert scores[0].failure == ""
    assert re.fullmatch(r"f\(.*\) returned .*, not .*", scores[1].failure)
    assert scores[2].failure.startswith("SyntaxError")
    # With all_or_nothing the tests after the first failure did not run.
    assert [score.parts["tests_passed"] for score in scores] == pytest.approx([1, 1 / 3, 0, 0])


def _refusing(status: int) -> Starlette:
    async def answer(_: Request) -> Response:
        return Response(b'{"error": "no"}', status)

    return Starlette(routes=[Route("/verify_batch", answer, methods=["POST"])])


async def test_client_retries_elsewhere_and_gives_up_with_a_typed_error(served: Served) -> None:
    dead = "http://127.0.0.1:9"
    async with (
        serve(_refusing(500)) as broken,
        serve(_refusing(503)) as full,
        client_of(timeout_s=30) as client,
    ):
        # They wait for the first servers to appear.
        waiting = [asyncio.create_task(client.verify(PROBLEM, GOOD)) for _ in range(30)]
        await asyncio.sleep(0)
        client.update_servers([dead, full, served.url])
        assert [verdicts_of(await each) for each in waiting] == [PASSES] * 30
        client.update_servers([broken])
        with pytest.raises(ProtocolError, match="500"):
            await client.verify(PROBLEM, GOOD)
    async with client_of(timeout_s=0.3) as hurried:
        for urls, said in (([], "0 verifiers"), ([dead], r"last reason: .*cannot be reached")):
            hurried.update_servers(urls)
            with pytest.raises(DeadlineExceeded, match=said):
                await hurried.verify(PROBLEM, GOOD)


async def test_client_says_whom_it_waits_for_and_why_once_nobody_takes_a_program(
    served: Served,
) -> None:
    activity = Activity()
    client = VerifierClient(run_config(), TOKEN, activity)
    async with serve(_refusing(429)) as full:
        client.update_servers([full])
        waiting = asyncio.create_task(client.verify(PROBLEM, GOOD))
        await _until(lambda: activity.snapshot().state == "waiting")
        said = f'verdicts: verifier {full} takes no request now: {{"error": "no"}}'
        assert activity.snapshot().waits_for == said
        client.update_servers([served.url])
        assert verdicts_of(await waiting) == PASSES
        assert activity.snapshot().waits_for == ""
        await client.close()


async def test_client_asks_the_server_with_the_fewest_of_its_programs(served: Served) -> None:
    async with verifier() as (busy, service), client_of(busy) as client:
        slow = asyncio.create_task(client.verify(PROBLEM, SLOW))
        await _until(lambda: service.num_running == 1)
        client.update_servers([busy, served.url])
        before = served.service.num_judged.total()
        for _ in range(5):
            assert verdicts_of(await client.verify(PROBLEM, GOOD)) == PASSES
        assert served.service.num_judged.total() - before == 5
        assert verdicts_of(await slow) == PASSES


async def test_infrastructure_error_is_retried_and_then_raised_never_scored(
    served: Served,
) -> None:
    async with verifier() as (url, service), client_of(url) as client:
        await service.cells.close()
        scorer = Scorer(run_config(), client, client.ask_functions)
        with pytest.raises(InfrastructureError, match="in 4 attempts"):
            await scorer.score(PROMPT, GOOD, no_sample)
        client.update_servers([url, served.url])
        assert verdicts_of(await client.verify(PROBLEM, GOOD)) == PASSES
