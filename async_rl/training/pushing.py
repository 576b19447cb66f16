"""Keep every generator on the newest published weights: push each new version to all generators,
and the current version to late joiners.

`weights/membership.py` decides who loads what and who is cut off; `weights/routes.py` reaches one
generator. This file makes the calls and owns the deadline. The shared block has one version;
`publish` overwrites it only while no generator reads it, which the deadline bounds. A generator
that misses the deadline is cut off, and gets the weights when it is back; all other generators
continue. With placement=colocated pushes wake generators, so no push starts between `take_device`
and `publish`, which returns the device.
"""

import asyncio
import functools
import time
from collections import defaultdict

import torch
from msgspec.structs import replace

from async_rl.core import records
from async_rl.core.errors import (
    AsyncRLError,
    BroadcastBroken,
    ConfigError,
    DeadlineExceeded,
    SenderLate,
    Superseded,
    WeightsError,
)
from async_rl.core.types import NO_VERSION
from async_rl.protocol.generator import LoadReport
from async_rl.protocol.weights import Manifest
from async_rl.runtime.context import ProcessContext
from async_rl.training.checkpoints import PUSHES_FILE, VERSIONS_FILE, Probed, Published, Pushed
from async_rl.training.device import Device, expel
from async_rl.training.mismatch import Prober
from async_rl.training.operations import EnterDevice, LeaveDevice
from async_rl.training.ranks import TrainingPool
from async_rl.weights.media import LearnerSide, Sender, folder_of
from async_rl.weights.membership import Answer, Life, Load, Membership, life_of
from async_rl.weights.routes import Route, open_senders

# To connect takes one to four seconds (weights/gate.py); a member that hangs should not delay the
# learner's exit for much longer.
SETTLE_S = 8.0


class Pusher:
    """Rank 0's side of the weights. rank_device: the device that this rank computes on."""

    def __init__(
        self,
        context: ProcessContext,
        pool: TrainingPool,
        device: Device,
        *,
        rank_device: torch.device,
        life: int,
    ) -> None:
        self._context = context
        self._life = life
        self._pool = pool
        self._device = device
        self._membership = Membership()
        self._manifest: Manifest  # every load follows it
        config = context.config
        learner = LearnerSide(
            config=config.weights,
            folder=folder_of(config.weights, context.run_dir, life),
            life=context.incarnation,
            host=context.host,
            device=rank_device,
            exporter=pool,
            push_s=config.timeouts.push_s,
            is_applied=config.model.is_applied,
        )
        self._senders = open_senders(learner)
        self._routes: dict[Life, Route] = {}
        self._prober = Prober(config)
        self._wake = asyncio.Event()
        self._changed = asyncio.Condition()
        self._slowest = defaultdict[str, tuple[int, float]](lambda: (NO_VERSION, 0.0))
        self._answers: list[Pushed] = []

    async def publish(self, version: int) -> None:
        """Write the weights into the block as soon as no generator reads it, and start the push."""
        # There is one block. A generator that reads it while it is written would get a mixture of
        # two versions, and refuse it.
        await self._until_no_load()
        # With the life, a generator refuses a push of an earlier learner that arrives late.
        compares = any(sender.compares for sender in self._senders)
        manifest = await self._pool.publish(version, compares=compares)
        self._manifest = replace(manifest, life=self._life)
        # Before any generator has the version, so that every version in use is recorded.
        published = Published(version=version, checksum=self._manifest.checksum, life=self._life)
        records.append(self._context.run_dir / VERSIONS_FILE, [published])
        # Before the device is returned: the learner's log-probs are computed on it.
        await self._prober.expect(self._pool, self._manifest)
        for sender in self._senders:
            await sender.offer(self._manifest)
        # After `offer`: a medium may read the weights from the device.
        if self._device.is_learners:
            leave = functools.partial(self._pool.lead, LeaveDevice())
            await self._device.give_back(leave)
        # Last: from now on loads may start, and on a shared device they wake generators.
        self._membership.publish(version)
        self._wake.set()

    async def take_device(self) -> None:
        """Start the learner's use of the device: no push and, if it is shared, no generation until
        `publish`.
        """
        if not self._device.is_learners:
            await self._until_no_load()
            await self._device.take(functools.partial(self._pool.lead, EnterDevice()))

    async def _until_no_load(self) -> None:
        """Wait until no load reads the block, or no load uses a shared device."""
        self._membership.close()
        async with self._changed:
            await self._changed.wait_for(
                lambda: (
                    not self._membership.loading
                    if self._device.is_shared
                    else self._membership.is_free
                )
            )

    async def settle(self) -> None:
        """Start no load, and wait for loads in progress; at most a few seconds if one hangs.

        Ranks that connect for a broadcast cannot be called off: they would wait for a learner that
        has left until their deadline.
        """
        self._membership.close()
        try:
            async with asyncio.timeout(SETTLE_S), self._changed:
                await self._changed.wait_for(lambda: not self._membership.loading)
        except TimeoutError:
            self._context.log.warning(
                "version %d is still being loaded after %g s; the learner exits without waiting",
                self._membership.version,
                SETTLE_S,
            )

    async def live(self, version: int) -> None:
        """Return once at least one generator serves and all that serve have `version` or a later
        one.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._membership.all_have(version))

    async def run(self) -> None:
        """Push until cancelled. Raises WeightsError if a probe shows that a generator does not
        compute the same policy as the learner.
        """
        directory = self._context.directory
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    seen = directory.revision
                    self._wake.clear()
                    self._follow()
                    # Before new loads: members of a broken broadcast give it up and can join one.
                    for sender in self._senders:
                        await sender.leave(self._membership)
                    self._begin_loads(tasks)
                    self._write_answers()
                    async with self._changed:
                        self._changed.notify_all()
                    # A change during the calls above has passed and would not wake this loop.
                    if directory.revision == seen:
                        await directory.changed_or(self._wake)
        finally:
            self._write_answers()
            for sender in self._senders:
                sender.close()

    def _follow(self) -> None:
        """Update routes and membership from the directory."""
        routes = {}
        for member in self._context.directory.of_role("generator"):
            life = life_of(member)
            # The old route knows which media do not reach this life.
            routes[life] = self._routes.get(life) or Route(member, self._senders)
        self._routes = routes
        self._membership.follow(routes)

    def _begin_loads(self, tasks: asyncio.TaskGroup) -> None:
        """Start a load for every generator that is behind and does not load yet."""
        together: dict[Sender, set[Life]] = {}
        for life, route in self._routes.items():
            if route.sender.loads_together:
                together.setdefault(route.sender, set()).add(life)
        for sender, lives in together.items():
            members = self._membership.next_together(lives)
            if members:
                routes = [self._routes[life] for life in members]
                load = self._membership.begin(members, awaits_sender=True)
                push = self._push_together(sender, load, routes)
                tasks.create_task(push, name=f"broadcast {self._manifest.version}")
        # Every other generator has its own load, so a slow one delays none of them.
        for life in self._membership.behind().difference(*together.values()):
            self._create_push(tasks, self._membership.begin([life]), self._routes[life])

    def _create_push(
        self, tasks: asyncio.TaskGroup, load: Load, route: Route, sent: asyncio.Event | None = None
    ) -> None:
        push = self._push(self._manifest, load, route, sent)
        tasks.create_task(push, name=f"push {load.version} to {route.member.name}")

    async def _push_together(self, sender: Sender, load: Load, routes: list[Route]) -> None:
        """Broadcast the version to the members; the block is free once it is sent."""
        manifest = self._manifest
        sender.join(load, [route.member for route in routes])
        sent = asyncio.Event()
        is_late = False
        async with asyncio.TaskGroup() as tasks:
            for route in routes:
                self._create_push(tasks, load, route, sent)
            try:
                await sender.send(manifest)
            except BroadcastBroken as error:
                # The members notice too; their answers and the deadline show which one is lost.
                is_late = isinstance(error, SenderLate)
                self._context.log.warning(
                    "version %d, load %d: %s", load.version, load.number, error
                )
            sent.set()
            cut_off = self._membership.sent(load, is_late=is_late)
            await expel(self._context, cut_off, "it alone gave up a broadcast to it alone")
            self._wake.set()

    def _write_answers(self) -> None:
        """Record the answers since the last call, a large fleet's in few writes."""
        if self._answers:
            records.append(self._context.run_dir / PUSHES_FILE, self._answers)
            self._answers.clear()

    async def _push(
        self, manifest: Manifest, load: Load, route: Route, sent: asyncio.Event | None
    ) -> None:
        """Push to one member of a load and probe it if that is due; cut off lives that failed."""
        life = life_of(route.member)
        deadline_s = self._context.config.timeouts.push_s + self._device.first_load_s(life)
        caller = self._context.incarnation_of(route.member)
        expected = self._prober.expected
        reason = ""
        report: LoadReport | None = None
        probed: Probed | None = None
        push_s = 0.0
        try:
            started_s = time.monotonic()
            report = await route.load(
                manifest,
                load,
                caller,
                handover=self._device.handover,
                timeout_s=deadline_s,
                num_readers=len(self._routes),
                release=self._wake.set,
                sent=sent,
            )
            push_s = time.monotonic() - started_s
            self._note(report, push_s)
            async with asyncio.timeout(deadline_s):
                probed = await self._prober.probe(caller, life, expected)
        except (TimeoutError, DeadlineExceeded) as error:
            reason = str(error) or f"it did not answer a probe within {deadline_s:g} s"
            cut_off = self._membership.expire(load)
        except (ConfigError, Superseded):
            # The file cannot be written, or another learner publishes: no generator is to blame.
            raise
        except AsyncRLError as error:
            reason = f"{type(error).__name__}: {error}"
            # A member that has left counts as lost, not as one that gave up.
            self._follow()
            gave_up = isinstance(error, BroadcastBroken)
            outcome = Answer.GAVE_UP if gave_up else Answer.FAILED
            cut_off = self._membership.answer(load, life, outcome)
        else:
            cut_off = self._membership.answer(load, life, Answer.LOADED)
        self._answers.append(
            Pushed(
                version=load.version,
                life=self._life,
                generator=life[0],
                pid=life[1],
                at_s=time.time(),
                push_s=push_s,
                loaded=None if report is None else report.version,
                reason=reason,
                probed=probed,
            )
        )
        if probed is not None and probed.problem:
            raise WeightsError(probed.problem)
        if cut_off:
            await expel(self._context, cut_off, reason)
        # Not after every answer: the loop looks at all members, and in a large fleet that would
        # take seconds. As long as loads are open, an answer in time leaves it nothing to do.
        is_current = not reason and load.version == self._membership.version
        if not (is_current and self._membership.loading):
            self._wake.set()

    def _note(self, report: LoadReport, push_s: float) -> None:
        """Keep the times of the slowest generator for the newest version."""
        for name, value in (("weights/push_s", push_s), ("weights/pause_s", report.pause_s)):
            # A late joiner of an older version says nothing about the newest push.
            self._slowest[name] = max(self._slowest[name], (report.version, value))

    def metrics(self) -> dict[str, float]:
        """Return the times of the newest push and the last probe."""
        return {name: value for name, (_, value) in self._slowest.items()} | self._prober.metrics
