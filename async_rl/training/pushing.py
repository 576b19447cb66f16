"""Keeps every generator on the newest published weights: pushes new versions to all, the current
one to late joiners.

Who loads what, and who is cut off, is decided by `weights/membership.py`; here are the calls, the
deadline and the probe. Each generator loads for itself (`weights/push.py`), or all together receive
what rank 0 broadcasts (`weights/transport/broadcast.py`). On a GPU in turns a version also stays in
memory there, for those that serve (`weights/transport/ipc.py`). The shared block holds one version.
`publish` overwrites it only while nobody reads it, which a deadline bounds. A generator that misses
the deadline is cut off (the supervisor starts it again) and gets the weights when it is back; the
others go on. With placement=colocated pushes wake generators, so none begins between `take_device`
and `publish`, which gives the device back.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Mapping

import numpy as np
import torch

from async_rl.core.errors import (
    AsyncRLError,
    ConfigError,
    DeadlineExceeded,
    GroupBroken,
    WeightsError,
)
from async_rl.core.types import NO_VERSION, FloatArray, IntArray
from async_rl.protocol.generator import LoadReport, Logprobs, Probe
from async_rl.protocol.membership import Expel, Member
from async_rl.protocol.weights import DeviceBlock, Manifest
from async_rl.runtime.context import ProcessContext
from async_rl.training.ranks import TrainingPool
from async_rl.training.shared_device import SharedDevice
from async_rl.weights.membership import Answer, Epoch, Life, WeightGroup
from async_rl.weights.push import Caller, Route, receive
from async_rl.weights.transport.broadcast import Broadcaster
from async_rl.weights.transport.filesystem import WeightFiles

Load = Callable[..., Awaitable[LoadReport]]
"""Asks the generator behind `caller` to load the version of an epoch."""

_PROBE_ROWS = 4
_PROBE_TOKENS = 16
_CAUSES = (
    "likely causes: different dtypes (model.dtype), a model that the engine implements differently,"
    " a head or an adapter that the push does not refresh, or weights.probe_tolerance below the"
    " dtype's precision"
)


class Pusher:
    """Rank 0's side of the weights, and of the device that it computes on."""

    def __init__(
        self, context: ProcessContext, ranks: TrainingPool, *, rank_device: torch.device
    ) -> None:
        self._context = context
        self._config = context.config.weights
        self._ranks = ranks
        self._group = WeightGroup()
        self.device = (
            SharedDevice(context, self._cut_off)
            if context.config.placement == "colocated"
            else None
        )
        self._is_on_gpu = self._config.transfer == "ipc"
        self._on_gpu: tuple[int, DeviceBlock] | None = None
        """A version, until all that serve hold it; who comes later reads the shared block."""
        self._manifest: Manifest | None = None
        self._files = WeightFiles(
            f"{self._config.path}/{context.run_dir.name}"
            if self._config.path is not None
            else str(context.run_dir / "weights")
        )
        self._file: tuple[int, asyncio.Task[str]] | None = None  # of this version
        self._routes: dict[Life, Route] = {}
        self._broadcaster = Broadcaster(
            self._config, life=context.incarnation, host=context.host, device=rank_device
        )
        self._wake = asyncio.Event()
        self._changed = asyncio.Condition()
        self._num_published = 0
        self._rows: list[IntArray] = []
        self._expected: list[FloatArray] = []
        self._measured = NO_VERSION
        self._metrics: dict[str, float] = {}

    async def publish(self, version: int) -> None:
        """Writes the weights into the block as soon as nobody reads it, and starts the push."""
        await self._until_nobody_loads()
        self._manifest = await self._ranks.publish(version)
        if self._is_probe_due():
            self._rows = self._rows or probe_rows(_vocabulary(self._manifest))
            self._expected = await self._ranks.logprobs(self._rows)
        else:
            self._expected = []
        if self._is_on_gpu:
            self._on_gpu = None  # `run` gives back only what is named here
            self._on_gpu = version, await self._ranks.share_on_device()
        if self.device is not None and self.device.is_learners:
            await self.device.give(self._ranks.leave_device)
        self._num_published += 1
        self._group.publish(version)
        self._wake.set()

    async def take_device(self, enter: Callable[[], Awaitable[None]]) -> None:
        """The next turn of the learner, if it shares its device and does not have it: no push, no
        generation until `publish`.
        """
        if self.device is not None and not self.device.is_learners:
            await self._until_nobody_loads()
            await self.device.take(enter)

    async def _until_nobody_loads(self) -> None:
        """At all where they share the learner's device, else out of the block."""
        self._group.close()
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._group.is_free if self.device is None else not self._group.loading
            )

    async def live(self, version: int) -> None:
        """Returns once at least one generator serves and all that serve hold `version` or a later
        one.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._group.all_hold(version))

    async def run(self) -> None:
        """Pushes until cancelled. Raises WeightsError if a probe shows that a generator does not
        compute what the learner does.
        """
        directory = self._context.directory
        try:
            async with asyncio.TaskGroup() as loads:
                while True:
                    seen = directory.revision
                    self._wake.clear()
                    members = self._members()
                    self._routes = {
                        life: route for life, route in self._routes.items() if life in members
                    }
                    await self._cut_off(
                        self._group.follow(members), "gave up a push that its others left"
                    )
                    self._broadcaster.end_what_broke()
                    self._begin_loads(members, loads)
                    async with self._changed:
                        self._changed.notify_all()
                    if self._on_gpu is not None and self._group.all_hold(self._on_gpu[0]):
                        self._on_gpu = None
                        await self._ranks.unshare_on_device()
                    if directory.revision == seen:
                        await directory.changed_or(self._wake)
        finally:
            self._files.close()
            self._broadcaster.close()

    def _members(self) -> dict[Life, Member]:
        return {(m.name, m.pid): m for m in self._context.directory.of_role("generator")}

    def _begin_loads(self, members: Mapping[Life, Member], loads: asyncio.TaskGroup) -> None:
        """Whoever is behind loads: together who gets a broadcast, each for itself who reads the
        block or a file.
        """
        together = {life for life, member in members.items() if self._broadcaster.reaches(member)}
        if party := self._group.next_party(together):
            epoch = self._group.begin(party)
            loads.create_task(
                self._broadcast({life: members[life] for life in party}, epoch),
                name=f"broadcast {epoch.version}",
            )
        for life in self._group.behind() - together:
            epoch = self._group.begin([life])
            turn = self.device.turn if self.device is not None else 0
            load: Load
            if self._on_gpu is not None and self._on_gpu[0] == epoch.version:
                load = functools.partial(receive, self._current(), self._on_gpu[1], turn=turn)
            else:
                route = self._routes.setdefault(
                    life, Route(self._config.transfer, self._write_file)
                )
                load = functools.partial(
                    route.load,
                    self._current(),
                    turn=turn,
                    written=functools.partial(self._release, epoch),
                )
            loads.create_task(
                self._load(members[life], epoch, load), name=f"push {epoch.version} to {life[0]}"
            )

    def _current(self) -> Manifest:
        assert self._manifest is not None, "an epoch begins after a version was published"
        return self._manifest

    def _release(self, epoch: Epoch) -> None:
        self._group.release(epoch.number)
        self._wake.set()

    async def _broadcast(self, members: Mapping[Life, Member], epoch: Epoch) -> None:
        """The members receive what this rank sends; the block is free once it is sent."""
        manifest, seats = self._current(), self._broadcaster.seats(epoch, members)
        async with asyncio.TaskGroup() as loads:
            for life, member in members.items():
                load = functools.partial(receive, manifest, seats[life])
                loads.create_task(
                    self._load(member, epoch, load), name=f"push {epoch.version} to {life[0]}"
                )
            try:
                await self._broadcaster.send(manifest, seats)
            except (
                GroupBroken
            ) as error:  # the members notice too; who is lost is for them and the deadline to tell
                self._context.log.warning(
                    "version %d, epoch %d: %s", epoch.version, epoch.number, error
                )
            self._release(epoch)

    async def _load(self, member: Member, epoch: Epoch, load: Load) -> None:
        """One member of an epoch: loads, is probed if that is due, answers, or is cut off."""
        life = (member.name, member.pid)
        deadline_s = self._config.deadline_s + (
            self.device.first_load_s(life) if self.device is not None else 0.0
        )
        caller, expected = self._context.incarnation_of(member), self._expected
        reason = ""
        try:
            async with asyncio.timeout(deadline_s):
                started_s = time.monotonic()
                report = await load(caller, timeout_s=2 * deadline_s)  # the deadline above ends it
                self._note(report, time.monotonic() - started_s)
                scores = await self._probe(caller) if expected else None
        except (TimeoutError, DeadlineExceeded):
            reason = (
                f"version {epoch.version} was not loaded within {deadline_s:g} s"
                " (weights.deadline_s)"
            )
            ended = self._group.expire(epoch.number)
        except ConfigError:  # the file cannot be written: no generator is to blame
            raise
        except AsyncRLError as error:
            reason = f"{type(error).__name__}: {error}"
            ended = self._group.follow(
                self._members()
            )  # one that has left is lost and gave nothing up
            ended |= self._group.answer(
                epoch.number,
                life,
                Answer.GAVE_UP if isinstance(error, GroupBroken) else Answer.FAILED,
            )
        else:
            self._compare(member.name, scores, expected, epoch.version)
            ended = self._group.answer(epoch.number, life, Answer.LOADED)
        await self._cut_off(ended, reason)
        self._wake.set()

    async def _write_file(self, manifest: Manifest) -> str:
        """The version's file, written once, when the first generator needs it."""
        if self._file is None or self._file[0] != manifest.version:
            self._file = (
                manifest.version,
                asyncio.create_task(
                    asyncio.to_thread(self._files.write, manifest, keep=self._group.loading),
                    name="write weights",
                ),
            )
        return await asyncio.shield(self._file[1])

    async def _probe(self, caller: Caller) -> Logprobs:
        scores: Logprobs = await caller.call(
            Probe(rows=self._rows), timeout_s=2 * self._config.deadline_s
        )
        return scores

    def _compare(
        self, name: str, scores: Logprobs | None, expected: list[FloatArray], version: int
    ) -> None:
        """Compares a generator's log-probs of the probe rows with the learner's."""
        if scores is None or scores.version != version:
            return
        worst = float(
            np.abs(np.concatenate(scores.rows) - np.concatenate(expected)).max()
        )  # max() would pass over a NaN
        self._metrics["weights/probe_abs_max"] = max(
            worst, self._metrics.get("weights/probe_abs_max", 0.0)
        )
        if not worst <= self._config.probe_tolerance:
            raise WeightsError(
                f"{name} and the learner disagree by {worst:.3g} nats on version {version} "
                f"(weights.probe_tolerance={self._config.probe_tolerance:g}); {_CAUSES}"
            )

    async def _cut_off(self, lives: set[Life], reason: str) -> None:
        """Has the supervisor end those that still serve; one that has gone by itself needs no more."""
        for name, pid in lives & {
            (m.name, m.pid) for m in self._context.directory.of_role("generator")
        }:
            self._context.activity.count("failures/generator_cut_off", 1)
            request = Expel(name=name, pid=pid, reason=reason)
            try:
                await self._context.supervisor.call(
                    request, timeout_s=self._context.config.network.call_timeout_s
                )
            except AsyncRLError as error:
                raise WeightsError(
                    f"{name} missed a push ({reason}) and could not be cut off: {error}"
                ) from error

    def _note(self, report: LoadReport, push_s: float) -> None:
        """Of the newest version, the slowest generator counts."""
        if report.version < self._measured:
            return
        if report.version > self._measured:
            self._measured = report.version
            self._metrics |= {"weights/push_s": 0.0, "weights/pause_s": 0.0}
        for name, value in (("weights/push_s", push_s), ("weights/pause_s", report.pause_s)):
            self._metrics[name] = max(self._metrics[name], value)

    def _is_probe_due(self) -> bool:
        every = self._config.probe_every_pushes
        return self._num_published == 0 or (every > 0 and self._num_published % every == 0)

    def metrics(self) -> dict[str, float]:
        """Figures of the newest push, and of a shared device."""
        return {**self._metrics, **(self.device.metrics() if self.device is not None else {})}


def _vocabulary(manifest: Manifest) -> int:
    return next(int(t.shape[0]) for t in manifest.tensors if "embed" in t.name)


def probe_rows(vocabulary: int) -> list[IntArray]:
    """A few rows of token ids spread over the vocabulary, the same in every run: int32 [16] each."""
    generator = np.random.default_rng(0)
    return [
        generator.integers(0, vocabulary, _PROBE_TOKENS, dtype=np.int32) for _ in range(_PROBE_ROWS)
    ]
