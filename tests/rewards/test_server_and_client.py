import asyncio
import json
import os
import re
import resource
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from composing import compose_unchecked
from rewards_support import (
    LIMITS,
    TOKEN,
    Served,
    calls,
    no_functions,
    no_sample,
    prompt_of,
    run_config,
    serve,
    verdicts_of,
    verifier,
)
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from async_rl.config.base import replace
from async_rl.core.errors import DeadlineExceeded, InfrastructureError, ProtocolError
from async_rl.core.types import CallTest, CodeProblem, StdinTest, Verdict
from async_rl.rewards.scoring import Scorer, VerifierClient
from async_rl.rewards.verifier.judging import Judge
from async_rl.rewards.verifier.protocol import VerifyRequest
from async_rl.rewards.verifier.service import VerifierService, open_service
from async_rl.sandbox.cells import Cells

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


@pytest.mark.parametrize("token", ["", "/token/other", "Bearer wrong"])
def test_every_route_wants_the_token(served: Served, token: str) -> None:
    """In a header or in the path."""
    path, headers = (token, {}) if token.startswith("/") else ("", {"authorization": token})
    with httpx.Client(base_url=served.url + path, headers=headers) as http:
        for route in ("/verify", "/verify_batch", "/apis/functioncalls"):
            assert http.post(route, json=_body()).status_code == 401
        assert http.get("/health").status_code == 401


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110  the other side is a socket away
        await asyncio.sleep(0.01)


async def test_full_queue_answers_429_and_a_leaving_client_takes_its_programs_along() -> None:
    async with asked(queue_size=1) as (http, service):
        batch = {"requests": [ENDLESS] * 2}
        waiting = asyncio.create_task(http.post("/verify_batch", json=batch))
        await _until(lambda: service.num_admitted == 2)
        refused = await http.post("/verify", json=_body())
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        waiting.cancel()
        await _until(lambda: service.num_admitted == 0)
        for code in (GOOD, GOOD, BAD, "def f("):
            await http.post("/verify", json=_body(code))
        health = (await http.get("/health")).json()
        assert health["verdicts"] == {"pass": 2, "wrong_answer": 1, "compile_error": 1}
        assert (health["refused"], health["queued"], health["running"]) == (1, 0, 0)
        assert service.cells.num_replaced == 0


async def test_a_program_that_finds_no_cell_in_time_is_an_infrastructure_error() -> None:
    async with asked(queue_timeout_s=1) as (http, service):
        waiting = asyncio.create_task(http.post("/verify", json=ENDLESS))
        await _until(lambda: service.num_running == 1)
        answer = (await http.post("/verify", json=_body())).json()
        assert answer["verdict"] == "infrastructure_error"
        said = "no cell was free within 1 s; add verifiers or cells"
        assert answer["tests"][0]["message"] == said
        waiting.cancel()
        await _until(lambda: service.num_admitted == 0)


async def test_each_of_many_jobs_gets_its_right_verdict_while_cells_are_killed() -> None:
    async with asked(num_cells=2) as (http, service):

        async def judged(number: int) -> str:
            call = {"kind": "call", "function": "f", "args": [3], "expected": 3 * number}
            body = _body(f"def f(x): return x * {number - number % 2}", tests=[call])
            while True:
                verdict = str((await http.post("/verify", json=body)).json()["verdict"])
                if verdict != "infrastructure_error":
                    return verdict

        jobs = [asyncio.create_task(judged(number)) for number in range(60)]
        for job in jobs[::12]:
            await job
            os.kill(next(iter(service.cells.alive)).pid, signal.SIGKILL)
        assert await asyncio.gather(*jobs) == ["pass", "wrong_answer"] * 30
        assert service.cells.num_replaced > 0


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


async def test_infrastructure_error_is_retried_and_then_raised_never_scored(served: Served) -> None:
    async with verifier() as (url, service), client_of(url) as client:
        await service.cells.close()
        scorer = Scorer(run_config(), client, client.ask_functions)
        with pytest.raises(InfrastructureError, match="in 4 attempts"):
            await scorer.score(PROMPT, GOOD, no_sample)
        client.update_servers([url, served.url])
        assert verdicts_of(await client.verify(PROBLEM, GOOD)) == PASSES


async def test_a_service_raises_the_limit_of_descriptors_that_its_jobs_need() -> None:
    """A shell allows 1,024, and each job of 64 streams has 130."""
    request = VerifyRequest(code="print(1)", tests=[StdinTest(input="1", output="1")] * 64)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        async with open_service(compose_unchecked("ppo_code", ["verifiers.cells=1"])) as service:
            assert (await service.verify(request)).verdict is Verdict.PASS
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("num_spare", [0, 1])
async def test_programs_that_use_up_their_limit_hold_up_others_only_without_a_spare_place(
    num_spare: int,
) -> None:
    sleeps = "import time\ndef f(x): time.sleep(60)"
    sleeper = VerifyRequest(code=sleeps, tests=calls(0), timeout_s=2)
    quick = VerifyRequest(code="def f(x): return x", tests=calls(0))
    async with await Cells.start(1 + num_spare) as cells:
        service = VerifierService(
            cells=cells, judge=Judge(cells, LIMITS), functions=no_functions(), queue_size=8,
            num_cells=1, queue_timeout_s=30, num_spare=num_spare,
        )  # fmt: skip
        slow = asyncio.create_task(service.verify(sleeper))
        await asyncio.sleep(0)
        assert (await service.verify(quick)).verdict == "pass"
        assert slow.done() is not bool(num_spare)
        assert (await slow).verdict == "timeout"
        # The place of the slow one is free again.
        assert (await service.verify(quick)).verdict == "pass"


ARRAYS = "import numpy as np\ndef f(x): return (np.array(x) + 0).item()\n"


async def test_cells_with_packages_start_with_the_first_program_that_names_one() -> None:
    """Verdicts of such programs are in programs.yaml."""
    config = compose_unchecked("ppo_code", ["verifiers.cells=1"])
    for packages, verdict in (["numpy"], "pass"), ([], "runtime_error"):
        sandbox = replace(LIMITS, packages=packages)
        async with open_service(replace(config, sandbox=sandbox)) as service:
            for code, right in ("def f(x): return x  # numbers", "pass"), (ARRAYS, verdict):
                request = VerifyRequest(code=code, tests=calls(0), timeout_s=2)
                assert (await service.verify(request)).verdict == right
                has_started = bool(service.judge.packaged.alive)
                assert has_started is (code == ARRAYS and packages != [])
