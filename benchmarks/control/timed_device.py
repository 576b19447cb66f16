"""Engine, loss and reward with the times of a simulated device: they wait that long.

A step of the engine writes one token of each sample in flight; `Device` has the times, and launched
processes read them from the variable TIMED_DEVICE. Everything between them is the product's own:
buffer, admission, pushes, scoring, learner. Waiting takes no processor time, so that runs on a busy
machine have nearly the times of a quiet one. Responses are random tokens.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import heapq
import itertools
import json
import os
import random
import time
import zlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.algorithms.losses import PolicyLoss
from async_rl.config.run import RunConfig
from async_rl.core.frozen import frozen
from async_rl.core.types import Sampling
from async_rl.generation.engine import OpenEngine
from async_rl.generation.hf import hf_opener
from async_rl.protocol.generator import Completion

SHORTEST, LONGEST = 8, 40
_MEAN_LOGPROB = -4.0
_VARIABLE = "TIMED_DEVICE"
_loss_ended_s = 0.0


@frozen
class Device:
    """Seconds of a step of the engine, of each sample in it, of the loss per token, of a reward.

    learner_slowdown: the learner waits for so many times its own processor time, less one.
    """

    engine_s: float = 0.02
    sample_s: float = 0.002
    loss_s: float = 0.001
    reward_s: float = 0.2
    learner_slowdown: float = 1.0

    def at_speeds(self, case: Mapping[str, float]) -> Device:
        """Return the device with the *_speed of a case of `async-rl plan`."""
        generation = case.get("generation_speed", 1.0)
        return Device(
            engine_s=self.engine_s / generation,
            sample_s=self.sample_s / generation,
            loss_s=self.loss_s / case.get("learner_speed", 1.0),
            learner_slowdown=self.learner_slowdown / case.get("learner_speed", 1.0),
            reward_s=self.reward_s / case.get("scoring_speed", 1.0),
        )

    def environment(self) -> dict[str, str]:
        """Return the variable that gives launched processes these times."""
        return {_VARIABLE: json.dumps(dataclasses.asdict(self))}


@functools.cache
def device() -> Device:
    """Return the device of this process."""
    return Device(**json.loads(os.environ.get(_VARIABLE, "{}")))


class TimedEngine:
    """The transformers engine holds the weights; its output is drawn and waited for."""

    def __init__(self, inner: Any, device: Device) -> None:
        self._inner, self._device = inner, device
        self._progress, self._updated_s = 0.0, time.monotonic()
        self._ends: list[tuple[float, int, asyncio.Event]] = []
        self._order = itertools.count()
        self._changed = asyncio.Event()
        self._clock = asyncio.create_task(self._run(), name="timed engine")

    @property
    def version(self) -> int:
        """The version of the inner engine."""
        return int(self._inner.version)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def close(self) -> None:
        """End both."""
        self._clock.cancel()
        await self._inner.close()

    @property
    def _step_s(self) -> float:
        return self._device.engine_s + self._device.sample_s * len(self._ends)

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            now_s = time.monotonic()
            if self._ends:
                self._progress += (now_s - self._updated_s) / self._step_s
            self._updated_s = now_s
            while self._ends and self._ends[0][0] <= self._progress + 1e-9:
                heapq.heappop(self._ends)[2].set()
            wait_s = None
            if self._ends:
                wait_s = (self._ends[0][0] - self._progress) * self._step_s
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _written(self, num_tokens: int) -> None:
        # The progress up to now has the old number of samples.
        if self._ends:
            self._progress += (time.monotonic() - self._updated_s) / self._step_s
        self._updated_s = time.monotonic()
        done = asyncio.Event()
        heapq.heappush(self._ends, (self._progress + num_tokens, next(self._order), done))
        self._changed.set()
        await done.wait()

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], num_samples: int, sampling: Sampling
    ) -> AsyncGenerator[Completion, None]:
        """Yield each completion when the device would have written it."""
        version, started_s = self.version, time.monotonic()
        tasks = []
        for index in range(num_samples):
            draw = random.Random(zlib.crc32(f"{request_id} {index}".encode()))
            natural = draw.randint(SHORTEST, LONGEST)
            length = min(natural, sampling.max_new_tokens)
            ids = np.array([draw.randrange(3, 60) for _ in range(length)], np.int32)
            done = Completion(
                index=index,
                token_ids=ids,
                logprobs=np.full(length, _MEAN_LOGPROB, np.float32),
                versions=np.full(length, version, np.int32),
                is_truncated=True,
                first_s=started_s + self._device.engine_s,
            )
            tasks.append(asyncio.create_task(self._after(length, done)))
        try:
            for finished in asyncio.as_completed(tasks):
                yield await finished
        finally:
            for task in tasks:
                task.cancel()

    async def _after(self, length: int, done: Completion) -> Completion:
        await self._written(length)
        return done


def engine(config: RunConfig, model_path: Path, *, seed: int) -> OpenEngine:
    """generation.engine=benchmarks.control.timed_device:engine"""
    opened = hf_opener(config, model_path, seed)

    async def open_engine() -> Any:
        return TimedEngine(await opened(), device())

    return open_engine


def loss(log_ratio: Any, *, advantages: Any, behavior_weight: Any, sequences: Any) -> PolicyLoss:
    """algorithm.policy_loss=benchmarks.control.timed_device:loss"""
    global _loss_ended_s
    # Not before the first loss: the imports are no work of a step.
    own_s = time.thread_time() - _loss_ended_s if _loss_ended_s else 0.0
    further_s = own_s * (device().learner_slowdown - 1)
    time.sleep(max(device().loss_s * log_ratio.numel() + further_s, 0.0))
    _loss_ended_s = time.thread_time()
    none = log_ratio > log_ratio.detach() + 1
    return PolicyLoss(-advantages * log_ratio.exp(), none, none)


async def reward(sample: Any) -> float:
    """reward.terms.timed=benchmarks.control.timed_device:reward"""
    await asyncio.sleep(device().reward_s)
    return float(zlib.crc32(sample.response.encode()) % 2)
