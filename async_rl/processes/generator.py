"""A generator: asks for work, lets the engine write, has each sample scored at once, puts complete
groups.

takes: tickets from the buffer, as many as it has room for; weights from the learner
waits for: the first weights; then admission, when it has room and the buffer gives nothing; a
learner that has the device
gives: complete groups to the buffer, or the ticket back with the reason
woken by: a written group (room), new weights (admission may open), the buffer's answer, Drain
(finishes what it holds, then ends)
"""

from __future__ import annotations

import asyncio
import contextlib
import functools

from async_rl.config.pools import evaluates_only, seat
from async_rl.config.sampling import num_drawn
from async_rl.core.errors import EngineDead, InfrastructureError, RewardError, root_cause
from async_rl.core.types import NO_VERSION, DropReason, Purpose, Ticket
from async_rl.generation.engine import Engine, build_engine, prepare_environment
from async_rl.generation.environment import gently, giving_way
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.buffer import FailGroup, PutGroup, RequestWork, Work
from async_rl.protocol.generator import (
    Drain,
    LoadReport,
    LoadWeights,
    Logprobs,
    Probe,
    ReceiveWeights,
    Rest,
)
from async_rl.rollouts.resting import Resting
from async_rl.rollouts.rollout import Rollouts, num_written
from async_rl.runtime.context import ProcessContext
from async_rl.weights.transport.filesystem import FileReader
from async_rl.wire.rpc import Handler

_PARK_S = 20.0


async def run(context: ProcessContext) -> None:
    """One generator from its start to its drain."""
    prepare_environment(context.config, context.cores)
    await context.directory.changed(-1)  # the first list of who serves
    async with contextlib.AsyncExitStack() as until_it_serves:
        await until_it_serves.enter_async_context(
            giving_way(to_others=bool(context.directory.of_role("generator")))
        )
        generator = Generator(context, await bring_up(context))
        try:
            if not generator.is_colocated:
                await generator.resting.start()
            await until_it_serves.aclose()
            handlers: dict[type[Message], Handler] = {
                LoadWeights: generator.load_weights,
                ReceiveWeights: generator.receive_weights,
                Probe: generator.probe,
                Drain: generator.drain,
                Rest: generator.resting.rest,
            }
            await context.serve(handlers, devices=await generator.weight_devices())
            await generator.work()
        finally:
            await generator.close()


async def bring_up(context: ProcessContext) -> Engine:
    """The engine, not started yet. Importing it is most of the work, done gently where others write
    already.
    """
    build = functools.partial(
        build_engine, context.config, context.model_path, rank=seat(context.config, context.name)
    )
    return await (
        gently(build) if context.directory.of_role("generator") else asyncio.to_thread(build)
    )


class Generator:
    """One engine and the rollouts in flight on it."""

    def __init__(self, context: ProcessContext, engine: Engine) -> None:
        self._context = context
        self._config = context.config
        self._engine = engine
        self.is_colocated = context.config.placement == "colocated"
        self.resting = Resting(engine, context.activity)
        self._rollouts = Rollouts(context, engine)
        self._files = FileReader()
        self._buffer = context.peer("buffer")
        self._held: dict[asyncio.Task[None], Ticket] = {}
        self._writing: dict[int, int] = {}
        self._has_weights = asyncio.Event()
        self._has_room = asyncio.Event()
        self._draining = asyncio.Event()

    async def work(self) -> None:
        """Keeps the engine full until told to stop or to drain; what is in flight after a stop goes
        back to the buffer.
        """
        async with asyncio.TaskGroup() as group:
            owned = [group.create_task(self._follow_verifiers(), name="follow verifiers")]
            if self.is_colocated:
                owned.append(
                    group.create_task(self.resting.start_when_called(), name="start the engine")
                )
                owned.append(group.create_task(self.resting.tell(), name="tell of rests"))
            asking = group.create_task(self._ask_for_work(group), name="ask for work")
            drained = group.create_task(self._finish(asking), name="drain")
            stopping = group.create_task(self._context.stopping.wait(), name="stopping")
            await asyncio.wait({drained, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in (*owned, asking, drained, stopping, *self._held):
                task.cancel()

    async def drain(self, _: Drain) -> Message:
        """Takes no more work from now on, and ends once the groups that it holds are done."""
        self._draining.set()
        return Ok()

    async def _finish(self, asking: asyncio.Task[None]) -> None:
        """Once told to drain: returns when no request for work is out and no group is held."""
        await self._draining.wait()
        self._has_room.set()
        if self._has_weights.is_set():
            await (
                self._tell_version()
            )  # the parked request is answered, so that no ticket comes after the last look
        else:
            asking.cancel()
        while waits := {task for task in (asking, *self._held) if not task.done()}:
            await asyncio.wait(waits)

    async def _ask_for_work(self, group: asyncio.TaskGroup) -> None:
        with self._context.activity.waiting("first weights from the learner"):
            await self._has_weights.wait()
        while not self._draining.is_set():
            if (room := self._room()) < 1:
                self._has_room.clear()
                await self._has_room.wait()
                continue
            work = await self._request_work(room)
            for ticket in work.tickets:
                task = group.create_task(self._roll_out(ticket), name=f"group {ticket.group_id}")
                self._held[task] = ticket
                self._writing[ticket.group_id] = num_written(
                    self._config, ticket.purpose, ticket.num_samples
                )
                task.add_done_callback(self._on_rollout_done)

    def _room(self) -> int:
        """Groups that may start now, counted by the samples being written; what only waits for its
        scores takes no room in the engine.
        """
        full_group = num_written(self._config, Purpose.TRAIN, num_drawn(self._config.generation))
        return self._config.generation.max_concurrent_groups - -(
            -sum(self._writing.values()) // full_group
        )

    async def _request_work(self, credit: int) -> Work:
        request = RequestWork(
            generator=self._context.name,
            incarnation=self._context.incarnation,
            version=self._engine.version,
            credit=credit,
            held=sorted(t.group_id for t in self._held.values()),
            wait_s=_PARK_S,
        )
        activity = self._context.activity
        is_aside = evaluates_only(self._config, self._context.name)
        with (
            activity.waiting("the next evaluation")
            if is_aside
            else activity.blocked("admission: the learner is behind")
        ):
            work: Work = await self._buffer.call(
                request, timeout_s=_PARK_S + self._config.supervisor.start_timeout_s
            )
        return work

    def _on_rollout_done(self, task: asyncio.Task[None]) -> None:
        self._on_written(self._held.pop(task))

    def _on_written(self, ticket: Ticket) -> None:
        self._writing.pop(ticket.group_id, None)
        self._has_room.set()

    async def _roll_out(self, ticket: Ticket) -> None:
        """The rollout boundary: whatever goes wrong with one group returns its ticket and is
        counted.
        """
        try:
            async with self.resting.limit(self._config.generation.timeout_s):
                group = await self._rollouts.group(
                    ticket, written=functools.partial(self._on_written, ticket)
                )
        except TimeoutError:
            limit_s = self._config.generation.timeout_s
            await self._fail(
                ticket,
                DropReason.GENERATION_FAILED,
                f"not done after {limit_s:g} s (generation.timeout_s)",
            )
        except (
            Exception
        ) as error:  # a bad rollout is data: the group fails, is counted, its ticket returns
            cause = root_cause(error)
            if isinstance(cause, EngineDead) or (
                isinstance(cause, RewardError) and self._config.reward.on_failure == "stop"
            ):
                raise
            reason = (
                DropReason.SCORING_FAILED
                if isinstance(cause, InfrastructureError)
                else DropReason.GENERATION_FAILED
            )
            reason = DropReason.REWARD_FAILED if isinstance(cause, RewardError) else reason
            await self._fail(ticket, reason, f"{type(cause).__name__}: {cause}")
        else:
            await self._buffer.call(PutGroup(group=group), timeout_s=self._put_timeout_s)

    @property
    def _put_timeout_s(self) -> float:
        """Long enough for the buffer to die and come back."""
        return self._config.supervisor.start_timeout_s

    async def _fail(self, ticket: Ticket, reason: DropReason, message: str) -> None:
        self._context.activity.count(f"failures/{reason}", 1)
        self._context.log.warning(
            "group %d, attempt %d: %s: %s", ticket.group_id, ticket.attempt, reason, message
        )
        request = FailGroup(
            group_id=ticket.group_id,
            attempt=ticket.attempt,
            generator=self._context.name,
            reason=reason,
            message=message,
        )
        await self._buffer.call(request, timeout_s=self._put_timeout_s)

    async def _follow_verifiers(self) -> None:
        directory = self._context.directory
        while True:
            revision = directory.revision
            self._rollouts.update_verifiers([m.address for m in directory.of_role("verifier")])
            await directory.changed(revision)

    async def load_weights(self, request: LoadWeights) -> Message:
        """New weights between two engine steps; admission learns at once what this generator
        samples with now.
        """
        async with self.resting.waking(request.turn):
            report = await self._load(request)
        self._tell_loaded(report)
        return report

    async def receive_weights(self, request: ReceiveWeights) -> Message:
        """As load_weights, out of a broadcast of the learner or memory of the GPU that both share."""
        async with self.resting.waking(request.turn):
            with self._context.activity("receiving weights"):
                report = await self._engine.load_weights(request.manifest, request.source)
        self._tell_loaded(report)
        return report

    async def weight_devices(self) -> list[str]:
        """What receives a broadcast; none where the engine is not up yet, because it shares its
        device with the learner.
        """
        return [] if self.is_colocated else await self._engine.weight_devices()

    def _tell_loaded(self, report: LoadReport) -> None:
        self._context.version = self._engine.version
        self._context.activity.gauge("weights/pause_s", report.pause_s)
        self._has_weights.set()
        self._context.group.create_task(self._tell_version(), name="tell version")

    async def _load(self, request: LoadWeights) -> LoadReport:
        with self._context.activity("loading weights"):
            manifest = request.manifest
            if request.url:
                manifest = await asyncio.to_thread(self._files.fetch, request.url, manifest)
            return await self._engine.load_weights(manifest)

    async def _tell_version(self) -> None:
        """Tells what the engine samples with now; the request for work that is parked comes back."""
        notice = RequestWork(
            generator=self._context.name,
            incarnation=self._context.incarnation,
            version=self._engine.version,
            credit=0,
            held=None,
            wait_s=0,
        )
        await self._buffer.call(notice, timeout_s=self._put_timeout_s)

    async def probe(self, request: Probe) -> Message:
        """Scores the learner's probe tokens with the weights held now."""
        version = self._engine.version
        rows = await self._engine.logprobs(request.rows)
        return Logprobs(
            version=version if version == self._engine.version else NO_VERSION, rows=rows
        )

    async def close(self) -> None:
        """Ends the engine and the connections to the verifiers."""
        await self._engine.close()
        self._files.close()
        await self._rollouts.close()
