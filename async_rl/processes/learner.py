"""The learner: takes a batch, trains it, commits the step, pushes the new weights; always one batch
ahead.

takes: batches from the buffer, leased for the version that will train them
waits for: a batch; the previous push; at the start, a generator that has the weights; with
placement=colocated, generators to go to sleep before it uses the device
gives: committed steps to the buffer, weights to the generators, metrics to the supervisor,
checkpoints to the run's directory
woken by: the buffer's answer, the trainer's thread
With placement=colocated all steps between two pushes are made in one handover.
Rank 0 runs `Learner`; the other ranks follow it (training/ranks.py).
"""

from __future__ import annotations

import asyncio
import functools
import time

import torch

from async_rl.core.types import Group
from async_rl.protocol.learner import (
    CommitStep,
    KeepAdvantages,
    StartEvaluation,
    StartFrom,
    SyncVersion,
)
from async_rl.runtime.context import ProcessContext
from async_rl.training import checkpoints
from async_rl.training.device import Device, open_device
from async_rl.training.pushing import Pusher
from async_rl.training.ranks import Rank, TrainingPool, build_trainer, learner_device
from async_rl.training.saving import Saver
from async_rl.training.taking import Taker


async def run(context: ProcessContext) -> None:
    """One rank of the learner from its start to its last step."""
    rank_device = learner_device(context.config.learner.gpus_each)
    make_trainer = functools.partial(build_trainer, context, rank_device)
    if context.rank > 0:
        await follow(context, await Rank.open(make_trainer))
        return
    # Rank 0 takes a shared device before it builds models; the other ranks wait for it where they
    # meet.
    device = open_device(context)
    pool = await device.take(functools.partial(TrainingPool.open, make_trainer))
    try:
        await context.serve({})
        await Learner(context, pool, device, rank_device).train()
        await pool.stop()
    finally:
        pool.close()


async def follow(context: ProcessContext, rank: Rank) -> None:
    """Take part in the operations of rank 0 until it stops."""
    try:
        await context.serve({})
        with context.activity("following rank 0"):
            await rank.follow()
    finally:
        rank.close()


class Learner:
    """Rank 0: the loop of steps."""

    def __init__(
        self,
        context: ProcessContext,
        pool: TrainingPool,
        device: Device,
        rank_device: torch.device,
    ) -> None:
        self._context = context
        self._config = context.config
        self._pool = pool
        self._buffer = context.peer("buffer")
        self._pusher = Pusher(context, pool, device, rank_device=rank_device)
        self._saver = Saver(context, pool)
        self._taker = Taker(context, device)
        self._version = 0
        # Long enough for the buffer to die and come back.
        self._call_s = context.config.timeouts.start_s

    async def train(self) -> None:
        """Step until num_steps or SIGTERM; then push the last weights and write a checkpoint."""
        await self._resume()
        async with asyncio.TaskGroup() as group:
            pushing = group.create_task(self._pusher.run(), name="push weights")
            await self._publish()
            with self._context.activity.waiting("a generator that holds the weights"):
                await self._pusher.live(self._version)
            await self._evaluate_if_due()
            await self._steps(group)
            await self._saver.save(self._version)
            await self._saver.finish()
            if not self._context.stopping.is_set():
                await self._pusher.live(self._version)
                await self._evaluate_if_due()
            pushing.cancel()

    async def _resume(self) -> None:
        """Load the newest checkpoint, if any; report the version to buffer and supervisor."""
        checkpoint = checkpoints.newest(self._context.run_dir)
        if checkpoint is not None:
            with self._context.activity("loading the checkpoint"):
                self._version = await self._pool.load(checkpoint)
            self._context.log.info("resumes from %s", checkpoint)
        self._context.version = self._version
        await self._buffer.call(SyncVersion(version=self._version), timeout_s=self._call_s)
        await self._context.supervisor.call(
            StartFrom(version=self._version), timeout_s=self._config.timeouts.call_s
        )

    async def _steps(self, group: asyncio.TaskGroup) -> None:
        """Train batch after batch; the next ones are requested while the current ones train."""
        stopping = group.create_task(self._context.stopping.wait(), name="stopping")
        upcoming = group.create_task(self._taker.take(self._version), name="take batch")
        while self._version < self._config.num_steps:
            started_s = time.monotonic()
            with self._context.activity.waiting("a batch"):
                await asyncio.wait({upcoming, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                break
            batches = upcoming.result()
            waited_s = time.monotonic() - started_s
            first = self._version + len(batches)
            if first < self._config.num_steps:
                upcoming = group.create_task(self._taker.take(first), name="take batch")
            await self._pusher.take_device()
            for groups in batches:
                await self._step(groups, started_s, waited_s)
                if stopping.done():
                    break
                started_s, waited_s = time.monotonic(), 0.0
        upcoming.cancel()
        stopping.cancel()

    async def _step(self, groups: list[Group], started_s: float, waited_s: float) -> None:
        """One learner step: train, commit, publish, report."""
        with self._context.activity("training"):
            result = await self._pool.step(groups, self._version)
        self._version += 1
        self._context.version = self._version
        self._context.activity.count("tokens_trained", result.scalars["tokens/trained"])
        ids = [g.group_id for g in groups]
        commit = CommitStep(version=self._version, group_ids=ids)
        await self._buffer.call(commit, timeout_s=self._call_s)
        if result.advantages:
            keep = KeepAdvantages(group_ids=ids, rows=result.advantages)
            await self._buffer.call(keep, timeout_s=self._call_s)
        is_last = self._version == self._config.num_steps
        if is_last or self._version % self._config.weights.push_every_steps == 0:
            await self._publish()
        if self._saver.is_due(self._version):
            await self._saver.save(self._version)
        times = {"time/step_s": time.monotonic() - started_s, "time/wait_batch_s": waited_s}
        await self._context.report(
            self._version,
            scalars={**result.scalars, **self._pusher.metrics(), **times},
            histograms=result.histograms,
        )
        if not is_last:  # the last version is evaluated by `train`, once it is live
            await self._evaluate_if_due()

    async def _publish(self) -> None:
        with self._context.activity("publishing"):
            await self._pusher.publish(self._version)

    async def _evaluate_if_due(self) -> None:
        every = self._config.evaluation.every_steps
        if every and (self._version % every == 0 or self._version == self._config.num_steps):
            request = StartEvaluation(version=self._version)
            await self._buffer.call(request, timeout_s=self._call_s)
