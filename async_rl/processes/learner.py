"""The learner: takes a batch, trains it, commits the step, pushes the new weights; always one batch
ahead.

takes: batches from the buffer, leased for the version that will train them
waits for: a batch; the previous push, if it is still under way; at the start, a generator that
holds version 0; with placement=colocated,
    generators to rest, before it touches the device: it makes the steps between two pushes in one
    turn
gives: committed steps to the buffer, weights to the generators, metrics to the supervisor,
checkpoints to the run's directory
woken by: the buffer's answer, the trainer's thread
Rank 0 runs `Learner`; the other ranks follow it through `ranks.py`.
"""

from __future__ import annotations

import asyncio
import time

import torch

from async_rl.config.pools import evaluates_only
from async_rl.core.errors import DeadlineExceeded
from async_rl.core.types import Group
from async_rl.learner.trainer import Trainer
from async_rl.protocol.learner import (
    Batch,
    CommitStep,
    KeepAdvantages,
    StartEvaluation,
    StartFrom,
    SyncVersion,
    TakeBatch,
)
from async_rl.runtime.context import ProcessContext
from async_rl.training import checkpoints
from async_rl.training.pushing import Pusher
from async_rl.training.ranks import TrainingPool, join_process_group, learner_device
from async_rl.training.saving import Saver

_TAKE_WAIT_S = 10.0


async def run(context: ProcessContext) -> None:
    """One rank of the learner from its start to its last step."""
    world_size = context.config.learner.ranks
    device = learner_device(context.config.learner.gpus_each)

    def make_trainer() -> Trainer:
        torch.set_num_threads(max(1, len(context.cores)))
        if world_size > 1:
            timeout_s = 2 * context.config.learner.take_timeout_s
            join_process_group(
                context.run_dir, context.rank, world_size, device=device, timeout_s=timeout_s
            )
        failed = context.run_dir / "failed_batches"
        return Trainer(
            context.config,
            context.model_path,
            rank=context.rank,
            world_size=world_size,
            device=device,
            failed_batches=failed,
        )

    ranks = TrainingPool(make_trainer, rank=context.rank, world_size=world_size)
    learner = Learner(context, ranks, device) if context.rank == 0 else None
    try:
        await (learner.start() if learner is not None else ranks.start())
        await context.serve({})
        if learner is not None:
            await learner.train()
            await ranks.stop()
        else:
            with context.activity("following rank 0"):
                await ranks.follow()
    finally:
        ranks.close()


class Learner:
    """Rank 0: the loop of steps."""

    def __init__(self, context: ProcessContext, ranks: TrainingPool, device: torch.device) -> None:
        self._context = context
        self._config = context.config
        self._ranks = ranks
        self._buffer = context.peer("buffer")
        self._pusher = Pusher(context, ranks, rank_device=device)
        self._version = 0

    async def start(self) -> None:
        """Builds the trainer; on a shared device, once no generator uses it. Other ranks wait for
        this one where they meet.
        """
        if self._pusher.device is None:
            await self._ranks.start()
        else:
            await self._pusher.take_device(self._ranks.start)

    async def train(self) -> None:
        """Steps until num_steps or until told to stop; ends with the last weights pushed and a
        checkpoint written.
        """
        await self._go_on()
        async with asyncio.TaskGroup() as group:
            self._saver = Saver(self._context, self._ranks, group)
            pushing = group.create_task(self._pusher.run(), name="push weights")
            await self._publish(self._version)
            with self._context.activity.waiting("a generator that holds the weights"):
                await self._pusher.live(self._version)
            await self._evaluate_if_due()
            stopping = group.create_task(self._context.stopping.wait(), name="stopping")
            upcoming = group.create_task(self._take_turn(self._version), name="take batch")
            while self._version < self._config.num_steps:
                started_s = time.monotonic()
                with self._context.activity.waiting("a batch"):
                    await asyncio.wait({upcoming, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if stopping.done():
                    break
                turn = upcoming.result()
                waited_s = time.monotonic() - started_s
                if self._version + len(turn) < self._config.num_steps:
                    upcoming = group.create_task(
                        self._take_turn(self._version + len(turn)), name="take batch"
                    )
                await self._pusher.take_device(self._ranks.enter_device)
                for groups in turn:
                    await self._step(groups, started_s, waited_s)
                    if stopping.done():
                        break
                    started_s, waited_s = time.monotonic(), 0.0
            upcoming.cancel()
            stopping.cancel()
            await self._saver.save(self._version)
            await self._saver.finish()
            if not self._context.stopping.is_set():
                await self._pusher.live(self._version)
                await self._evaluate_if_due()
            pushing.cancel()

    async def _go_on(self) -> None:
        """Takes up the newest checkpoint, if there is one, and tells those who count along."""
        if (checkpoint := checkpoints.newest(self._context.run_dir)) is not None:
            with self._context.activity("loading the checkpoint"):
                self._version = await self._ranks.load(checkpoint)
            self._context.log.info("goes on from %s", checkpoint)
        self._context.version = self._version
        await self._buffer.call(SyncVersion(version=self._version), timeout_s=self._restart_s)
        await self._context.supervisor.call(
            StartFrom(version=self._version), timeout_s=self._config.network.call_timeout_s
        )

    async def _step(self, groups: list[Group], started_s: float, waited_s: float) -> None:
        """One learner step, committed, published and reported."""
        with self._context.activity("training"):
            result = await self._ranks.step(groups, self._version)
        self._version += 1
        self._context.version = self._version
        self._context.activity.count("tokens_trained", result.scalars["tokens/trained"])
        ids = [g.group_id for g in groups]
        await self._buffer.call(
            CommitStep(version=self._version, group_ids=ids), timeout_s=self._restart_s
        )
        if result.advantages:
            await self._buffer.call(
                KeepAdvantages(group_ids=ids, rows=result.advantages), timeout_s=self._restart_s
            )
        if (
            self._version % self._config.weights.push_every_steps == 0
            or self._version == self._config.num_steps
        ):
            await self._publish(self._version)
        if self._saver.is_due(self._version):
            await self._saver.save(self._version)
        times = {"time/step_s": time.monotonic() - started_s, "time/wait_batch_s": waited_s}
        await self._context.report(
            self._version,
            scalars={**result.scalars, **self._pusher.metrics(), **times},
            histograms=result.histograms,
        )
        if self._version < self._config.num_steps:
            await self._evaluate_if_due()

    async def _take_turn(self, first: int) -> list[list[Group]]:
        """The batches of the steps made at one go, from that version on: one; on a shared device
        those up to the next push.
        """
        every = self._config.weights.push_every_steps if self._pusher.device is not None else 1
        return [
            await self._take(version)
            for version in range(first, min(first + every - first % every, self._config.num_steps))
        ]

    async def _take(self, train_version: int) -> list[Group]:
        """The batch that will be trained on weights of `train_version`."""
        deadline_s = time.monotonic() + self._config.learner.take_timeout_s
        while True:
            request = TakeBatch(train_version=train_version, wait_s=_TAKE_WAIT_S)
            batch: Batch = await self._buffer.call(
                request, timeout_s=_TAKE_WAIT_S + self._restart_s
            )
            if batch.groups:
                return batch.groups
            is_own_turn = self._pusher.device is not None and self._pusher.device.is_learners
            if is_own_turn or all(
                evaluates_only(self._config, member.name)
                for member in self._context.directory.of_role("generator")
            ):
                deadline_s = (
                    time.monotonic() + self._config.learner.take_timeout_s
                )  # scaled to none, until more are asked for
            elif time.monotonic() > deadline_s:
                raise DeadlineExceeded(
                    f"no batch for version {train_version} within"
                    f" {self._config.learner.take_timeout_s:g} s (learner.take_timeout_s); the"
                    f" buffer waits for {batch.waits_for}"
                )

    async def _publish(self, version: int) -> None:
        with self._context.activity("publishing"):
            await self._pusher.publish(version)

    async def _evaluate_if_due(self) -> None:
        every = self._config.evaluation.every_steps
        if every and (self._version % every == 0 or self._version == self._config.num_steps):
            await self._buffer.call(
                StartEvaluation(version=self._version), timeout_s=self._restart_s
            )

    @property
    def _restart_s(self) -> float:
        """Long enough for the buffer to die and come back."""
        return self._config.supervisor.start_timeout_s
