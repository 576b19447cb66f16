"""A run in one process: the product's buffer, store, groups and rollouts over timed devices.

Engine, scoring and learner wait for the times of timed_device.py; buffer, admission, store, tickets
and the order of everything are the product's own. It leaves a run's directory. Against a real run
it lacks processes and their messages, the verifier, and the push itself.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from async_rl.buffer.service import BufferService
from async_rl.buffer.store.store import Store
from async_rl.composition.compose import write_config
from async_rl.config.run import RunConfig
from async_rl.core.types import CodeProblem, Prompt, Purpose, Score
from async_rl.data.prompt_file import PromptOrder
from async_rl.observability.activity import Activity
from async_rl.protocol.buffer import (
    CommitStep,
    ForgetBefore,
    SyncVersion,
    TakeBatch,
    TakenGroups,
)
from async_rl.rollouts.groups import Groups
from async_rl.rollouts.rollout import Rollouts
from async_rl.rollouts.turns import Sleeping
from benchmarks.control.timed_device import Device, TimedEngine

PUSH_S = 0.05


class Prompts:
    """A thousand prompts without tests."""

    vocabulary_size = 1000
    num_train, num_held_out = 1000, 0

    def __init__(self) -> None:
        self.order = PromptOrder(0, self.num_train, shuffle=False)

    def prompt(self, purpose: Purpose, index: int) -> Prompt:
        """Return the prompt at a position."""
        return Prompt(
            prompt_id=f"{purpose}{index}",
            text="",
            token_ids=np.array([1, 2], np.int32),
            data_source="timed",
            problem=CodeProblem(tests=[]),
        )


class Scorer:
    """Scores after a wait, as many samples at once as there are places."""

    def __init__(self, seconds: float, places: asyncio.Semaphore) -> None:
        self._seconds, self._places = seconds, places

    async def close(self) -> None:
        """Nothing is open."""

    async def score(self, prompt: Prompt, text: str, sample: object) -> Score:
        """Return a score of 0 or 1 after the wait."""
        async with self._places:
            await asyncio.sleep(self._seconds)
        return Score(reward=float(len(text) % 2), parts={}, verdicts=(), latency_s=self._seconds)


class Letters:
    """Stands for the tokenizer."""

    def decode(self, ids: Any, *, skip_special_tokens: bool) -> str:
        """Return a letter per token."""
        return "a" * len(ids)


class Buffer:
    """The service without a socket."""

    def __init__(self, service: BufferService) -> None:
        self._handlers = service.handlers()

    async def call(self, request: Any, *, wait_s: float = 0.0) -> Any:
        """Return the answer."""
        return await self._handlers[type(request)](request)


def generator(
    config: RunConfig, buffer: Buffer, index: int, device: Device, places: asyncio.Semaphore
) -> Any:
    """Return a generator's (state, groups)."""
    inner = SimpleNamespace(version=0, close=functools.partial(asyncio.sleep, 0))
    context = SimpleNamespace(
        config=config,
        name=f"generator-{index}",
        incarnation="a",
        life=1,
        version=0,
        activity=Activity(),
        log=logging.getLogger("timed"),
        call_buffer=buffer.call,
    )
    rollouts = Rollouts(
        config,
        tokenizer=Letters(),
        token="t",
        name=context.name,
        activity=context.activity,
        maker=None,
    )
    rollouts.scorer = Scorer(device.reward_s, places)  # type: ignore[assignment]
    rollouts.control = SimpleNamespace(remember=lambda *_: None)  # type: ignore[assignment]

    async def opened() -> Any:
        return TimedEngine(inner, device)

    sleeping = Sleeping(opened, context.activity)
    groups = Groups(
        context,  # type: ignore[arg-type]
        rollouts,
        engine=lambda: sleeping.engine,
        limit=sleeping.limit,
    )
    return context, inner, sleeping, groups


async def learn(
    config: RunConfig, buffer: Buffer, members: list[Any], loss_s: float
) -> list[dict[str, float]]:
    """Train all steps as the learner does, one batch ahead; return the rows of metrics."""
    await buffer.call(SyncVersion(incarnation="l", version=0))

    async def taken(version: int) -> TakenGroups:
        request = TakeBatch(life=1, train_version=version, wait_s=600)
        batch: TakenGroups = await buffer.call(request)
        return batch

    async def push(version: int) -> None:
        await asyncio.sleep(PUSH_S)
        for context, inner, _, groups in members:
            context.version = inner.version = version
            await groups.report_version()

    rows, pushes = [], []
    ended_s, ahead = time.monotonic(), asyncio.create_task(taken(0))
    for version in range(config.num_steps):
        began_s = time.monotonic()
        batch = await ahead
        waited_s = time.monotonic() - began_s
        if version + 1 < config.num_steps:
            ahead = asyncio.create_task(taken(version + 1))
        lengths = [s.response_length for group in batch.groups for s in group.samples]
        await asyncio.sleep(loss_s * sum(lengths))
        ids = [group.group_id for group in batch.groups]
        await buffer.call(CommitStep(life=1, version=version + 1, group_ids=ids))
        every = config.checkpoint.every_steps
        if every and (version + 1) % every == 0:
            await buffer.call(ForgetBefore(life=1, version=version + 1))
        if (version + 1) % config.weights.push_every_steps == 0:
            pushes.append(asyncio.create_task(push(version + 1)))
        rows.append(
            {
                "step": version + 1,
                "time/step_s": time.monotonic() - ended_s,
                "time/wait_batch_s": waited_s,
                "weights/push_s": PUSH_S,
                "length/response_mean": float(np.mean(lengths)),
            }
        )
        ended_s = time.monotonic()
    await asyncio.gather(*pushes)
    return rows


async def play(config: RunConfig, run_dir: Path, device: Device) -> None:
    """Make the run in this directory."""
    await asyncio.to_thread(run_dir.mkdir, parents=True)
    write_config(config, run_dir / "config.yaml")
    async with Store(run_dir, clock=time.time) as store:
        prompts: Any = Prompts()
        buffer = Buffer(BufferService(config, prompts, store, clock=time.monotonic))
        places = asyncio.Semaphore(config.verifiers.count * config.reward.concurrency)
        members = [
            generator(config, buffer, index, device, places)
            for index in range(config.generators.count)
        ]
        making = []
        for _, _, sleeping, groups in members:
            await sleeping.start()
            groups.weights_loaded()
            making.append(asyncio.create_task(groups.make()))
        rows = await learn(config, buffer, members, device.loss_s)
        for task in making:
            task.cancel()
        await asyncio.gather(*making, return_exceptions=True)
        for _, _, sleeping, _ in members:
            await sleeping.engine.close()
    lines = [msgspec.json.encode(row) for row in rows]
    (run_dir / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")
