"""The front of a training service in virtual time: desk, order and store, with clients that repeat
what they got no answer to. Front and learner are killed at drawn times.

Promise: each client gets the answers, and each run ends with the weights, that it has without
kills.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import gateway as web
import httpx
import network
from loop import Process, VirtualLoop, kill
from service_support import KEY, Played, batch, open_desk

from async_rl.protocol.service import Execute, Executed
from async_rl.service.front import build_app
from async_rl.service.store import Checkpoint, Sampler, Session

SESSION = "0123456789abcdef"
URL = "http://front:8080"
UNTIL_S = 5000.0


class Learner(Played):
    """Takes a while for each request, before and after it changes the weights."""

    def __init__(self, rng: random.Random, mean_s: float) -> None:
        super().__init__()
        self._rng, self._mean_s = rng, mean_s

    async def execute(self, request: Execute) -> Executed:
        await asyncio.sleep(self._rng.expovariate(1 / self._mean_s))
        executed = await super().execute(request)
        await asyncio.sleep(self._rng.expovariate(1 / self._mean_s))
        return executed


class _Clock:
    """The loop's. now_s: the support moves it, without an effect."""

    now_s = 0.0

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def __call__(self) -> float:
        return 1e9 + self._loop.time()


class Service:
    """One service. programs: the requests of each run, in order. With has_kills the processes are
    killed now and then while the clients work.
    """

    def __init__(self, seed: int, path: Path, *, has_kills: bool) -> None:
        draw = random.Random(f"service {seed}")
        self._programs = {
            f"{SESSION}:train:{n}": _program(draw, n) for n in range(draw.choice((1, 2, 3)))
        }
        self._kills = [
            (draw.uniform(0.0, 120.0), draw.choice(("front", "learner", "both")))
            for _ in range(draw.choice((1, 2, 4, 8)))
        ]
        self._has_kills = has_kills
        self.rng = random.Random(seed)
        self.path = path
        self.loop = VirtualLoop(lambda: self.rng.expovariate(1 / 0.002))
        self.network = network.Network(self.loop, self.rng)
        self.played = Learner(self.rng, draw.choice((0.3, 2.0, 4.0)))
        self.answers: dict[tuple[str, int], bytes] = {}
        self.num_lives = itertools.count(1)
        self._front: Process | None = None

    def run(self) -> dict[str, Any]:
        """Return the answers and the end of each run."""
        shutil.rmtree(self.path, ignore_errors=True)

        patched = {"network": self.network, "on_sent": staticmethod(lambda *_: None)}
        with mock.patch.multiple(web.Transport, create=True, **patched):
            asyncio.set_event_loop(self.loop)
            try:
                self.loop.run_until_complete(self._main())
            finally:
                if self._front is not None:
                    kill(self._front)
                self.loop.bury()
                asyncio.set_event_loop(None)
        chains = {run: (state.chain, state.version) for run, state in self.played.memory.items()}
        return {"answers": self.answers, "chains": chains, **self._stored()}

    def _stored(self) -> dict[str, dict[str, str]]:
        """The states of checkpoints and adapters by path, and the samplers."""
        desk = open_desk(self.path, self.played)
        with contextlib.closing(desk.store) as store:
            saved = {
                it.path: (Path(it.directory) / "state.json").read_text()
                for it in store.all(Checkpoint, "TRUE")
            }
            samplers = {
                it.sampler_id: str(it).replace(str(self.path), "")
                for it in store.all(Sampler, "TRUE")
            }
        return {"saved": saved, "samplers": samplers}

    async def _main(self) -> None:
        self._start_front()
        clients = [
            self.loop.start(Process(f"client-{n}", n), self._client(run))
            for n, run in enumerate(self._programs)
        ]
        killing = asyncio.create_task(self._cause())
        async with asyncio.timeout(UNTIL_S):
            await asyncio.gather(*clients, killing)
        # A run whose learner was killed last is restored by its next request.
        await asyncio.gather(
            *(
                self.loop.start(Process(f"last-{n}", n), self._touch(run))
                for n, run in enumerate(self._programs)
            )
        )

    def _start_front(self) -> None:
        self._front = Process("front", 1000)
        self.loop.start(self._front, self._serve(f"{next(self.num_lives)}-"))

    async def _serve(self, prefix: str) -> None:
        clock: Any = _Clock(self.loop)
        desk = open_desk(self.path, self.played, clock=clock, prefix=prefix, poll_s=5.0)
        assert self._front is not None
        self._front.on_death.append(desk.store.close)
        if not desk.store.all(Session, "TRUE"):
            desk.store.add(
                Session(
                    session_id=SESSION,
                    display_name=None,
                    user_metadata="{}",
                    seen_s=desk.store.now(),
                )
            )
        web.Site(URL, build_app(desk, KEY), self.network, lambda *_: None)
        await desk.run()

    async def _cause(self) -> None:
        for at_s, who in sorted(self._kills) if self._has_kills else ():
            await asyncio.sleep(max(0.0, 1000.0 + at_s - self.loop.time()))
            if who != "front":
                self.played.kill_learner()
            if who != "learner":
                assert self._front is not None
                kill(self._front)
                await asyncio.sleep(self.rng.expovariate(1.0))
                self._start_front()

    # ---- clients

    async def _client(self, run: str) -> None:
        waiting: list[tuple[int, str]] = []
        async with _http() as http:
            for seq_id, (path, body) in enumerate(self._programs[run]):
                accepted = await self._post(http, path, body)
                waiting.append((seq_id, accepted.json()["request_id"]))
                # Some are on their way together.
                while waiting and (seq_id in (0, len(self._programs[run]) - 1) or len(waiting) > 3):
                    await self._answer(http, run, *waiting.pop(0))

    async def _touch(self, run: str) -> None:
        seq_id = len(self._programs[run])
        self._programs[run] = [("forward_backward", batch(run, seq_id, [1], forward_only=True))]
        async with _http() as http:
            accepted = await self._post(http, *self._programs[run][0])
            await self._answer(http, run, seq_id, accepted.json()["request_id"])

    async def _answer(self, http: httpx.AsyncClient, run: str, seq_id: int, request: str) -> None:
        while True:
            reply = await self._post(http, "retrieve_future", json.dumps({"request_id": request}))
            is_json = reply.headers["content-type"] == "application/json"
            if not is_json or reply.json().get("type") != "try_again":
                self.answers[run, seq_id] = reply.content
                return

    async def _post(self, http: httpx.AsyncClient, path: str, body: str | bytes) -> httpx.Response:
        while True:
            try:
                reply = await http.post(path, content=body, timeout=20.0)
            except httpx.TransportError:
                await asyncio.sleep(0.5)
                continue
            assert reply.status_code == 200, f"{path}: {reply.text}"
            return reply


def _http() -> httpx.AsyncClient:
    headers = {"X-API-Key": KEY}
    return httpx.AsyncClient(transport=web.Transport(), base_url=f"{URL}/api/v1/", headers=headers)


def _program(draw: random.Random, number: int) -> list[tuple[str, str | bytes]]:
    """The requests of one run: batches whose gradients accumulate, steps, states, loads."""
    run = f"{SESSION}:train:{number}"
    created = {
        "session_id": SESSION,
        "model_seq_id": number,
        "base_model": "local/tiny",
        "lora_config": {"rank": 8},
    }
    requests: list[tuple[str, str | bytes]] = [("create_model", json.dumps(created))]
    saved: list[str] = []
    for seq_id in range(1, draw.choice((5, 15, 40))):
        kinds = ("batch", "batch", "batch", "wrong", "step", "step", "save", "load", "sampler")
        kind = draw.choice(kinds)
        form: dict[str, Any] = {"model_id": run, "seq_id": seq_id}
        if kind in ("batch", "wrong"):
            row = [draw.randrange(100) for _ in range(draw.randint(2, 8))]
            loss = "cross_entropy" if kind == "batch" else "unknown"
            is_forward = draw.random() < 0.2
            content = batch(run, seq_id, row, loss=loss, forward_only=is_forward)
            requests.append(("forward_backward", content))
        elif kind == "step":
            form["adam_params"] = {"learning_rate": draw.random()}
            requests.append(("optim_step", json.dumps(form)))
        elif kind == "sampler":
            form |= {"kind": "inflight", "sampling_session_seq_id": 10 * seq_id + number}
            requests.append(("save_weights_for_sampler", json.dumps(form)))
        elif kind == "load" and saved:
            form |= {"path": f"tinker://{run}/weights/{draw.choice(saved)}", "optimizer": True}
            requests.append(("load_weights", json.dumps(form)))
        else:
            saved.append(f"state-{seq_id}")
            form["path"] = saved[-1]
            requests.append(("save_weights", json.dumps(form)))
    return requests


def differences(seed: int, path: Path) -> list[str]:
    """Return the answers and ends that kills change."""
    expected = Service(seed, path / "calm", has_kills=False).run()
    found = Service(seed, path / "kills", has_kills=True).run()
    return [
        f"{kind} of {key}: {found[kind].get(key)!r} instead of {value!r}"
        for kind, values in expected.items()
        for key, value in values.items()
        if found[kind].get(key) != value
    ]
