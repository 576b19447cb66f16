"""The learner: takes a batch, trains it, commits the step, pushes the new weights; always one batch
ahead.

takes: batches from the buffer, leased for the version that will train them
waits for: a batch; the previous push; at the start, a generator that has the weights; with
placement=colocated, generators to go to sleep before it uses the device
sends: committed steps to the buffer, weights to the generators, metrics to the supervisor,
checkpoints to the run's directory
woken by: the buffer's answer, the trainer's thread
A batch that cannot be trained is dropped, and another one is taken for the same version.
With placement=colocated all steps between two pushes are made in one handover.
Rank 0 runs `Learner`; the other ranks follow it (training/ranks.py).
"""

import asyncio
import functools
import time

import torch

from async_rl.core.errors import NonFiniteError, PartlyTrained, RestartNeeded, StalenessError
from async_rl.core.heads import GroupHead
from async_rl.learner.loading import learner_device
from async_rl.learner.trainer import StepResult
from async_rl.protocol.base import Message
from async_rl.protocol.buffer import (
    CommitStep,
    DropBatch,
    SetAside,
    StartEvaluation,
    StartFrom,
)
from async_rl.runtime.context import ProcessContext
from async_rl.training.device import Device, SharedDevice
from async_rl.training.mismatch import AgeWatch
from async_rl.training.operations import Fetch, Perform, Step, Stop
from async_rl.training.pushing import Pusher
from async_rl.training.ranks import Rank, TrainingPool, build_trainer
from async_rl.training.saving import Saver, resume
from async_rl.training.taking import Parts, Taker
from async_rl.weights.sending import SendingRank
from async_rl.wire.rpc import Handler

_MOST_DROPPED = 3
"""Batches that may fail at one step before the run stops: one or two may be bad luck."""


async def run(context: ProcessContext) -> None:
    """One rank of the learner from its start to its last step."""
    rank_device = learner_device(context.config.learner.gpus_each)
    make_trainer = functools.partial(build_trainer, context, rank_device)
    config = context.config
    number = context.rank // config.learner.context_ranks
    parts = Parts(context.call_buffer, number)
    if context.rank > 0:
        rank = await Rank.open(make_trainer, context.incarnation, parts)
        await follow(context, rank, rank_device)
        return
    # Rank 0 takes a shared device before it builds models; the other ranks wait for it where they
    # meet.
    device = SharedDevice(context) if config.takes_turns else Device()
    others = [context.peer(f"learner-{rank}") for rank in range(1, context.config.learner.ranks)]
    pool = await device.take(
        functools.partial(TrainingPool.open, make_trainer, context.incarnation, parts, others)
    )
    try:
        await context.serve({})
        start = await resume(context, pool)
        await Learner(context, pool, device, rank_device, start).train()
        await pool.lead(Stop())
    finally:
        pool.close()


async def follow(context: ProcessContext, rank: Rank, device: torch.device) -> None:
    """Take part in the operations of rank 0, and in broadcasts of weights, until it stops."""
    sending = SendingRank(device, host=context.host)
    try:
        own: dict[type[Message], Handler] = {Perform: rank.accept, Fetch: rank.read}
        await context.serve(own | sending.handlers)
        with context.activity("following rank 0"):
            await rank.follow()
    finally:
        sending.close()
        rank.close()


class Learner:
    """Rank 0: the loop of steps."""

    def __init__(
        self,
        context: ProcessContext,
        pool: TrainingPool,
        device: Device,
        rank_device: torch.device,
        start: StartFrom,
    ) -> None:
        self._context = context
        self._config = context.config
        self._pool = pool
        self._device = device
        self._pusher = Pusher(context, pool, device, rank_device=rank_device, life=start.life)
        self._saver = Saver(context, pool, life=start.life)
        self._taker = Taker(context, device, pool.fetch, life=start.life)
        quantization = context.config.generation.quantization
        self._age_watch = AgeWatch(context.log, quantization=quantization)
        self._version = start.version
        self._life = start.life

    async def train(self) -> None:
        """Step until num_steps or SIGTERM; then push the last weights and write a checkpoint."""
        async with asyncio.TaskGroup() as group:
            pushing = group.create_task(self._pusher.run(), name="push weights")
            await self._publish()
            with self._context.activity.waiting("a generator that has the weights"):
                await self._pusher.live(self._version)
            await self._evaluate_if_due()
            await self._steps(group)
            await self._saver.save(self._version)
            await self._saver.finish()
            if not self._context.stopping.is_set():
                await self._pusher.live(self._version)
                await self._evaluate_if_due()
            await self._pusher.settle()
            pushing.cancel()

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
            # Requested before training, so that the buffer reads and sends it during the step. One
            # request ahead hides that time; more would only need memory.
            first = self._version + len(batches)
            if first < self._config.num_steps:
                upcoming = group.create_task(self._taker.take(first), name="take batch")
            await self._pusher.take_device()
            for groups in batches:
                try:
                    with self._context.activity(self._age_watch.stage):
                        step = Step(version=self._version)
                        result: StepResult = await self._pool.lead(step)
                except (NonFiniteError, StalenessError) as error:
                    # First: after the drop the buffer returns the leases of later batches.
                    upcoming.cancel()
                    await self._drop(groups, error)
                    upcoming = group.create_task(self._taker.take(self._version), name="take batch")
                    break
                await self._end_step(groups, result, started_s, waited_s)
                if stopping.done():
                    break
                # Batches of one request come together, so only the first one waits.
                started_s = time.monotonic()
                waited_s = 0.0
        upcoming.cancel()
        stopping.cancel()

    async def _end_step(
        self, groups: list[GroupHead], result: StepResult, started_s: float, waited_s: float
    ) -> None:
        """After the training of one step: commit, publish, report."""
        self._version += 1
        self._context.version = self._version
        self._context.activity.count("tokens_trained", result.scalars["tokens/trained"])
        self._age_watch.observe(self._version, {**result.scalars, **self._pusher.metrics()})
        ids = [g.group_id for g in groups]
        commit = CommitStep(life=self._life, version=self._version, group_ids=ids)
        # Before the weights are published: admission then opens for the version that they have, and
        # no generator reports a version that the buffer does not know.
        await self._context.call_buffer(commit)
        is_last = self._version == self._config.num_steps
        if is_last or self._version % self._config.weights.push_every_steps == 0:
            await self._publish()
        if self._saver.is_due(self._version):
            await self._saver.save(self._version)
        times = {"time/step_s": time.monotonic() - started_s, "time/wait_batch_s": waited_s}
        await self._context.report(
            self._version,
            scalars={**result.scalars, **self._pusher.metrics(), **times},
        )
        if not is_last:  # the last version is evaluated by `train`, once it is live
            await self._evaluate_if_due()

    async def _drop(self, groups: list[GroupHead], error: NonFiniteError | StalenessError) -> None:
        """Drop a batch that cannot be trained; it would fail again at every resume.

        Raises the error itself if several batches fail at one step: then the weights or the
        settings are the cause, and dropping would only lose prompts. Raises RestartNeeded if
        the weights were changed before the failure, or the learner has a shared device.
        """
        drop = DropBatch(
            life=self._life,
            train_version=self._version,
            group_ids=[group.group_id for group in groups],
            message=str(error),
        )
        dropped: SetAside = await self._context.call_buffer(drop)
        if dropped.num_batches >= _MOST_DROPPED:
            raise error
        self._context.log.warning(
            "the batch of step %d is dropped as untrainable (%d of at most %d): %s",
            self._version + 1,
            dropped.num_batches,
            _MOST_DROPPED,
            error,
        )
        # While it has a shared device, no generator could make another batch.
        if isinstance(error, PartlyTrained) or self._device.is_shared:
            raise RestartNeeded(f"step {self._version + 1} cannot be continued") from error

    async def _publish(self) -> None:
        with self._context.activity("publishing"):
            await self._pusher.publish(self._version)

    async def _evaluate_if_due(self) -> None:
        if self._config.is_evaluated(self._version):
            request = StartEvaluation(life=self._life, version=self._version)
            await self._context.call_buffer(request)
