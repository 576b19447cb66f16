"""Several gateways on one buffer: each makes groups with its own sessions; they join, drain and are
killed, and every token that an agent saw is trained once at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
from buffer_support import FakePrompts, commit, make_config, opened, take
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.buffer.service import BufferService
from async_rl.config.base import replace
from async_rl.core.types import CodeProblem, Prompt, Purpose, Sampling, Trajectory
from async_rl.observability.activity import Activity
from async_rl.protocol.base import Message
from async_rl.protocol.buffer import FailGroup, PutGroup, ReleaseGenerator, RequestWork
from async_rl.protocol.generator import Completion
from async_rl.rollouts.agents import Agents
from async_rl.rollouts.groups import Groups
from async_rl.rollouts.journal import Journal
from async_rl.rollouts.rollout import Rollouts
from async_rl.sessions.endpoint import Endpoint
from async_rl.sessions.open_sessions import Sessions
from async_rl.sessions.server import build_app

_CONFIG = make_config(group_size=2, groups_per_step=2, max_attempts=50)
CONFIG = replace(
    _CONFIG,
    rollout=replace(_CONFIG.rollout, fn=["mine:play"]),
    generation=replace(_CONFIG.generation, max_concurrent_groups=2),
)


class Numbers:
    """Token k is the word wk; 0 ends and is no text."""

    chat_template = None
    eos_token = ""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(f"w{int(i)} " for i in ids if i)

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [int(number) for number in re.findall(r"w(\d+)", text)]}


class Prompts(FakePrompts):
    def prompt(self, purpose: Purpose, index: int) -> Prompt:
        prompt = super().prompt(purpose, index)
        return Prompt(
            prompt_id=prompt.prompt_id,
            text="w1 w2",
            token_ids=prompt.token_ids,
            data_source="fake",
            problem=CodeProblem(tests=[], row="{}"),
        )


class Engine:
    """Never writes the same token twice."""

    version = 0

    def __init__(self) -> None:
        self.served: dict[int, int] = {}
        self.limit_of_answers = 10_000
        self.is_spent = asyncio.Event()
        self._tokens = itertools.count(10)

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], num_samples: int, sampling: Sampling
    ) -> AsyncGenerator[Completion, None]:
        await asyncio.sleep(0)
        if len(self.served) == self.limit_of_answers:
            self.is_spent.set()
            await asyncio.Event().wait()
        token = next(self._tokens)
        self.served[token] = self.version
        yield Completion(
            index=0,
            token_ids=np.array([token, 0], np.int32),
            logprobs=np.full(2, -float(token), np.float32),
            versions=np.full(2, self.version, np.int32),
            is_truncated=False,
        )

    @property
    def engine(self) -> Engine:
        return self

    @contextlib.asynccontextmanager
    async def limit(self, timeout_s: float) -> AsyncIterator[None]:
        async with asyncio.timeout(timeout_s):
            yield


class Playing:
    """Agents of two turns inside the test's own loop. seen: each answer that an agent got."""

    def __init__(self, app: Any, seen: list[str]) -> None:
        self._transport = httpx.ASGITransport(app)
        self._seen = seen

    async def run(self, endpoint: Endpoint, task: dict[str, Any]) -> Any:
        messages = [{"role": "user", "content": task["prompt"]}]
        headers = {"authorization": f"Bearer {endpoint.api_key}"}
        async with httpx.AsyncClient(
            transport=self._transport, base_url="http://gateway", headers=headers
        ) as client:
            for _ in range(2):
                body = {"model": "policy", "messages": messages}
                reply = (await client.post("/v1/chat/completions", json=body)).json()
                message = reply["choices"][0]["message"]
                self._seen.append(message["content"].strip())
                messages += [message, {"role": "user", "content": "w3"}]
        return 1.0

    async def close(self) -> None:
        pass


class Fleet:
    """The gateways of one run."""

    def __init__(self, folder: Path, service: BufferService) -> None:
        self.engine = Engine()
        self.seen: list[str] = []
        self._folder = folder
        self._service = service
        self._lives = itertools.count()
        self._running: dict[str, tuple[Any, Groups, asyncio.Task[None]]] = {}

    @property
    def names(self) -> list[str]:
        return sorted(self._running)

    def start(self, name: str) -> None:
        sessions = Sessions()
        activity = Activity()

        async def call(request: Message, *, timeout_s: float) -> Message:
            match request:
                case RequestWork():
                    return await self._service.request_work(request)
                case PutGroup():
                    return await self._service.put_group(request)
                case FailGroup():
                    raise AssertionError(request.message)
            raise AssertionError(request)

        context: Any = SimpleNamespace(
            config=CONFIG,
            name=name,
            incarnation=str(next(self._lives)),
            life=1,
            version=self.engine.version,
            activity=activity,
            log=logging.getLogger("test"),
            peer=lambda _: SimpleNamespace(call=call),
        )
        journal = Journal(self._folder / name, "1")
        agents = Agents(
            CONFIG,
            tokenizer=Numbers(),
            sessions=sessions,
            environments=Playing(build_app(sessions), self.seen),
            journal=journal,
            url="",
        )
        rollouts = Rollouts(
            CONFIG,
            tokenizer=Numbers(),
            token="t",
            name=name,
            activity=activity,
            maker=agents.sample,
        )
        groups = Groups(
            context,
            rollouts,
            engine=lambda: self.engine,
            limit=asyncio.timeout,
            on_closed=lambda ticket: journal.forget(ticket.group_id),
        )
        groups.weights_loaded()
        self._running[name] = context, groups, asyncio.create_task(groups.make())

    async def load(self, version: int) -> None:
        self.engine.version = version
        for context, groups, _ in self._running.values():
            context.version = version
            await groups.report_version()

    async def drain(self, name: str) -> None:
        _, groups, task = self._running.pop(name)
        groups.drain()
        async with asyncio.timeout(30):
            await task
        assert not self._service.state.admission.num_of_generator(name)

    async def kill(self, name: str) -> None:
        *_, task = self._running.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await self._service.release_generator(ReleaseGenerator(generator=name, incarnation=""))

    async def close(self) -> None:
        for name in self.names:
            await self.kill(name)


async def train(service: BufferService, fleet: Fleet, version: int) -> list[Trajectory]:
    """One step; the samples of its groups."""
    async with asyncio.timeout(30):
        taken = await take(service, version - 1, wait_s=20.0)
    group_ids = [head.group_id for head in taken.groups]
    groups = await service.store.groups(group_ids)
    samples = [s for group in groups for s in group.unpacked().trajectories]
    await commit(service, version, group_ids)
    await fleet.load(version)
    return samples


def check(samples: Sequence[Trajectory], fleet: Fleet) -> None:
    """What was served is what is trained, with its log-probs and versions, and nothing twice."""
    written = [
        (int(token), float(logprob), int(version))
        for sample in samples
        for token, logprob, version in zip(
            sample.token_ids[sample.loss_mask],
            sample.behavior_logprobs[sample.loss_mask],
            sample.versions[sample.loss_mask],
            strict=True,
        )
        if token
    ]
    assert len(written) == 2 * len(samples)
    assert len({token for token, _, _ in written}) == len(written)
    for token, logprob, version in written:
        assert (logprob, version) == (-float(token), fleet.engine.served[token])
        assert f"w{token}" in fleet.seen


NAMES = ("gateway-0", "gateway-1", "gateway-2")


@settings(max_examples=12, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(("start", "drain", "kill", "wait", "train")), st.sampled_from(NAMES)
        ),
        max_size=14,
    )
)
def test_gateways_that_come_and_go_train_what_they_served_once(
    steps: list[tuple[str, str]],
) -> None:
    async def scenario(folder: Path) -> None:
        async with opened(folder, CONFIG, Prompts()) as service:
            fleet = Fleet(folder / "sessions", service)
            samples: list[Trajectory] = []
            version = 0
            try:
                for do, name in steps:
                    if do == "start" and name not in fleet.names:
                        fleet.start(name)
                    elif do == "drain" and name in fleet.names:
                        await fleet.drain(name)
                    elif do == "kill" and name in fleet.names:
                        await fleet.kill(name)
                    elif do == "wait":
                        for _ in range(7):
                            await asyncio.sleep(0)
                    elif do == "train" and fleet.names:
                        version += 1
                        samples += await train(service, fleet, version)
                if not fleet.names:
                    fleet.start("gateway-0")
                samples += await train(service, fleet, version + 1)
            finally:
                await fleet.close()
            check(samples, fleet)

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(scenario(Path(folder)))


async def test_a_killed_gateway_s_groups_go_on_at_another_with_what_was_served(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, CONFIG, Prompts()) as service:
        fleet = Fleet(tmp_path / "sessions", service)
        fleet.engine.limit_of_answers = 6
        fleet.start("gateway-0")
        async with asyncio.timeout(30):
            await fleet.engine.is_spent.wait()
        await fleet.kill("gateway-0")
        shown = set(fleet.seen)
        assert shown
        fleet.engine.limit_of_answers = 1000
        fleet.start("gateway-1")
        samples = await train(service, fleet, 1) + await train(service, fleet, 2)
        await fleet.close()
        check(samples, fleet)
        trained = {f"w{token}" for s in samples for token in s.token_ids[s.loss_mask]}
        assert shown <= trained
        # The records of the four trained groups are gone, also those of the killed gateway.
        left = {int(file.name) for file in (tmp_path / "sessions").glob("*/records-of-life-1/*")}
        assert left.isdisjoint(range(4))
