"""Promises 1 and 2 under arbitrary interleavings of requests, results, losses, takes, commits and
crashes of every party.

The generators and the learner here are honest but unreliable: replies get lost, results come twice
or late, everyone may be killed between any two steps, and the buffer also in the middle of a
request, with any prefix of what it queued for the store written. The learner saves and lets delete
as the product does: the store keeps what the oldest of its newest two checkpoints needs.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from buffer_support import Clock, FakePrompts, ask, make_config, make_group
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from async_rl.buffer.admission import Admission
from async_rl.buffer.service import BufferService
from async_rl.buffer.store.audit import audit
from async_rl.buffer.store.ledger import reading
from async_rl.buffer.store.store import Store
from async_rl.config.run import RunConfig
from async_rl.core.types import Group, GroupState, Purpose, Ticket
from async_rl.launchers.commands.ledger import promise_of
from async_rl.protocol.base import Message
from async_rl.protocol.buffer import FailGroup, PutGroup, ReleaseGenerator, Work
from async_rl.protocol.learner import (
    CommitStep,
    DropBatch,
    ForgetBefore,
    SetAside,
    StartEvaluation,
    SyncVersion,
    TakeBatch,
    TakenGroups,
)

T = TypeVar("T")
NAMES = ("generator-0", "generator-1")
SHARED_MEMORY = Path("/dev/shm")
GENERATORS = st.sampled_from(NAMES)
Crash = tuple[int, int]
"""Turns of the loop into a request before the buffer is killed, and the changes written then."""
CRASHES = st.one_of(st.none(), st.tuples(st.integers(0, 3), st.integers(0, 8)))
CHOICES = st.integers(min_value=0, max_value=99)


@dataclass
class FakeGenerator:
    """Tickets with the version that their first token was sampled with."""

    name: str
    life: int = 0
    version: int = 0
    held: list[tuple[Ticket, int]] = field(default_factory=list)

    @property
    def incarnation(self) -> str:
        return f"life-{self.life}"


@dataclass
class FakeLearner:
    version: int = 0
    kept: list[int] = field(default_factory=lambda: [0])
    batches: dict[int, list[int]] = field(default_factory=dict)


class BufferMachine(RuleBasedStateMachine):
    """Drives one BufferService on a real store."""

    @initialize(
        groups_per_step=st.integers(1, 3),
        max_staleness=st.integers(0, 3),
        age_rule=st.sampled_from(["drop", "mask", "exact"]),
        max_attempts=st.integers(1, 4),
    )
    def start(
        self,
        groups_per_step: int,
        max_staleness: int,
        age_rule: str,
        max_attempts: int,
    ) -> None:
        self.loop = asyncio.new_event_loop()
        self.directory = Path(
            tempfile.mkdtemp(
                prefix="buffer-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
            )
        )
        self.config: RunConfig = make_config(
            groups_per_step=groups_per_step,
            max_staleness=max_staleness,
            age_rule=age_rule,
            max_attempts=max_attempts,
            group_size=1,
        )
        self.clock = Clock()
        self.generators = {name: FakeGenerator(name) for name in NAMES}
        self.learner = FakeLearner()
        self.late: list[Group] = []
        self.history: list[list[int]] = []
        self.num_lives = 0
        self.has_gone_back = False
        self.has_dropped_batch = False
        self.open_buffer()

    # ---- the buffer's life

    def open_buffer(self) -> None:
        self.store = Store(self.directory / "store.sqlite", clock=self.clock)
        self.run(self.store.__aenter__())
        self.service = BufferService(
            self.config, FakePrompts(num_train=4, num_held_out=2), self.store, clock=self.clock
        )

    def kill_buffer(self, num_written: int = 0, holder: sqlite3.Connection | None = None) -> None:
        """Lose what is queued and not yet written, as with kill -9, except the first changes."""
        waiting, lost = self.store._queue, []
        while not waiting.empty():
            lost.append(waiting.get())
        for item in [item for item in lost if isinstance(item, tuple)][:num_written]:
            waiting.put(item)
        if holder is not None:
            holder.close()
        self.run(self.store.__aexit__())

    def held_writer(self) -> sqlite3.Connection:
        """Keep the writer from taking more from its queue until this connection is closed."""
        holder = sqlite3.connect(self.directory / "store.sqlite", isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        self.store.put((), {})
        while not self.store._queue.empty():
            time.sleep(0)
        return holder

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

    def call(
        self, coroutine: Coroutine[Any, Any, Message], crash: Crash | None = None
    ) -> Message | None:
        """The reply, or None if the buffer was killed in the request, and came back."""
        if crash is None:
            return self.run(coroutine)
        num_turns, num_written = crash

        async def begin() -> asyncio.Task[Message]:
            task = asyncio.create_task(coroutine)
            for _ in range(num_turns):
                await asyncio.sleep(0)
            return task

        holder = self.held_writer()
        task = self.run(begin())
        self.kill_buffer(num_written, holder)
        task.cancel()
        self.run(_end(task))
        self.open_buffer()
        return None

    @rule()
    def restart_buffer(self) -> None:
        self.kill_buffer()
        self.open_buffer()

    # ---- generators

    @rule(
        name=GENERATORS,
        credit=st.integers(0, 4),
        is_lost=st.booleans(),
        crash=CRASHES,
    )
    def ask_for_work(self, name: str, credit: int, is_lost: bool, crash: Crash | None) -> None:
        generator = self.generators[name]
        held = [ticket.group_id for ticket, _ in generator.held]
        request = ask(
            generator.version,
            generator=name,
            incarnation=generator.incarnation,
            credit=credit,
            held=held,
        )
        reply = self.call(self.service.request_work(request), crash)
        if isinstance(reply, Work) and not is_lost:
            assert len(reply.tickets) <= credit
            known = {(ticket.group_id, ticket.attempt) for ticket, _ in generator.held}
            new = [t for t in reply.tickets if (t.group_id, t.attempt) not in known]
            assert all(t.admitted_version <= generator.version for t in new)
            generator.held.extend((ticket, generator.version) for ticket in new)

    @rule(name=GENERATORS, lag=st.integers(0, 2))
    def push(self, name: str, lag: int) -> None:
        """A push of the newest version or a late one; never back, except after the learner went
        back.
        """
        generator = self.generators[name]
        wanted = max(self.learner.version - lag, 0)
        if wanted > generator.version or (lag == 0 and wanted < generator.version):
            generator.version = wanted
            generator.held = [(ticket, min(first, wanted)) for ticket, first in generator.held]

    @rule(
        name=GENERATORS,
        which=CHOICES,
        twice=st.booleans(),
        crash=CRASHES,
        spread=st.integers(0, 3),
    )
    def put(self, name: str, which: int, twice: bool, crash: Crash | None, spread: int) -> None:
        generator = self.generators[name]
        if not generator.held:
            return
        ticket, first = generator.held[which % len(generator.held)]
        versions = sorted(
            {first, max(first, generator.version - spread), max(first, generator.version)}
        )
        group = make_group(ticket, versions=versions, generator=name)
        if self.call(self.service.put_group(PutGroup(group=group)), crash) is None:
            self.late.append(group)
            return
        generator.held = [(t, f) for t, f in generator.held if t is not ticket]
        if twice:
            self.run(self.service.put_group(PutGroup(group=group)))

    @rule(which=CHOICES)
    def put_late(self, which: int) -> None:
        """A result whose generator was killed, or given up, or did not hear the answer."""
        if self.late:
            self.run(self.service.put_group(PutGroup(group=self.late.pop(which % len(self.late)))))

    @rule(name=GENERATORS, which=CHOICES)
    def put_untrainable(self, name: str, which: int) -> None:
        generator = self.generators[name]
        if generator.held:
            ticket, _ = generator.held.pop(which % len(generator.held))
            self.run(
                self.service.put_group(
                    PutGroup(group=make_group(ticket, trained=False, generator=name))
                )
            )

    @rule(name=GENERATORS, which=CHOICES, crash=CRASHES)
    def fail(self, name: str, which: int, crash: Crash | None) -> None:
        generator = self.generators[name]
        if not generator.held:
            return
        ticket, first = generator.held[which % len(generator.held)]
        request = FailGroup(
            group_id=ticket.group_id,
            attempt=ticket.attempt,
            generator=name,
            reason="scoring_failed",
            message="",
        )
        if self.call(self.service.fail_group(request), crash) is not None:
            generator.held.remove((ticket, first))

    @rule(name=GENERATORS, is_told=st.booleans(), leaves_late=st.booleans())
    def kill_generator(self, name: str, is_told: bool, leaves_late: bool) -> None:
        generator = self.generators[name]
        if leaves_late:
            self.late.extend(
                make_group(ticket, versions=[first], generator=name)
                for ticket, first in generator.held
            )
        incarnation, generator.held = generator.incarnation, []
        generator.life += 1
        generator.version = self.learner.version
        if is_told:
            self.run(
                self.service.release_generator(
                    ReleaseGenerator(generator=name, incarnation=incarnation)
                )
            )

    @rule(seconds=st.sampled_from([1.0, 31.0, 151.0]), alive=st.sets(GENERATORS))
    def let_time_pass(self, seconds: float, alive: set[str]) -> None:
        self.clock.now += seconds
        assert self.service.expire(sorted(alive)) > 0
        self.run(self.store.flush())

    # ---- the learner

    @rule(crash=CRASHES)
    def take(self, crash: Crash | None) -> None:
        """One batch ahead of training, or the one to be trained now again."""
        learner = self.learner
        wanted = learner.version if learner.version not in learner.batches else learner.version + 1
        reply = self.call(self.service.take_batch(TakeBatch(train_version=wanted, wait_s=0)), crash)
        if not isinstance(reply, TakenGroups):
            return
        group_ids = [group.group_id for group in reply.groups]
        assert bool(group_ids) != bool(reply.waits_for)
        if wanted in learner.batches:
            assert group_ids == learner.batches[wanted]
        elif group_ids:
            assert len(group_ids) == self.config.buffer.groups_per_step
            learner.batches[wanted] = group_ids

    @rule(twice=st.booleans(), crash=CRASHES)
    def commit(self, twice: bool, crash: Crash | None) -> None:
        learner = self.learner
        if learner.version not in learner.batches:
            return
        request = CommitStep(
            version=learner.version + 1, group_ids=learner.batches[learner.version]
        )
        reply = self.call(self.service.commit_step(request), crash)
        if reply is None or twice:
            self.run(self.service.commit_step(request))
        self.history = [*self.history[: learner.version], learner.batches.pop(learner.version)]
        learner.version += 1

    @rule(twice=st.booleans(), crash=CRASHES)
    def drop_batch(self, twice: bool, crash: Crash | None) -> None:
        """It cannot be trained."""
        learner = self.learner
        if learner.version not in learner.batches:
            return
        request = DropBatch(
            train_version=learner.version,
            group_ids=learner.batches[learner.version],
            message="loss nan",
        )
        self.has_dropped_batch = True
        reply = self.call(self.service.drop_batch(request), crash)
        if reply is None or twice:
            reply = self.run(self.service.drop_batch(request))
        assert isinstance(reply, SetAside)
        assert reply.num_batches >= 1
        learner.batches = {}

    @rule(forgets=st.booleans())
    def save(self, forgets: bool) -> None:
        learner = self.learner
        if learner.version not in learner.kept:
            learner.kept = [*learner.kept, learner.version][-2:]
        if forgets:
            self.run(self.service.forget_before(ForgetBefore(version=learner.kept[0])))

    @rule(saved_first=st.booleans(), is_damaged=st.booleans(), crash=CRASHES)
    def kill_learner(self, saved_first: bool, is_damaged: bool, crash: Crash | None) -> None:
        """Return to its checkpoint, which may hold one step that it had no time to commit, or to
        the one before if it is damaged.
        """
        learner = self.learner
        if saved_first and learner.version in learner.batches:
            self.history = [*self.history[: learner.version], learner.batches[learner.version]]
            learner.version += 1
            learner.kept = [*learner.kept, learner.version][-2:]
        if is_damaged:
            learner.kept = learner.kept[:1]
        if learner.kept[-1] < learner.version:
            self.has_gone_back = True
        learner.version, learner.batches = learner.kept[-1], {}
        self.history = self.history[: learner.version]
        self.num_lives += 1
        start = SyncVersion(version=learner.version, incarnation=f"life {self.num_lives}")
        if self.call(self.service.sync_version(start), crash) is None:
            self.run(self.service.sync_version(start))

    @rule()
    def evaluate(self) -> None:
        self.run(self.service.start_evaluation(StartEvaluation(version=self.learner.version)))

    @property
    def admission(self) -> Admission:
        return self.service.state.admission

    # ---- what must hold

    @invariant()
    def active_groups_are_within_the_bound(self) -> None:
        if not self.has_gone_back:
            assert self.admission.num_active <= self.admission.max_active

    @invariant()
    def memory_and_store_agree_and_every_group_is_in_one_state(self) -> None:
        with self.reading() as connection:
            stored = dict(
                connection.execute("SELECT group_id, state FROM groups WHERE purpose='train'")
            )
        admission, replay = self.admission, self.service.state.replay
        memory = {
            g.group_id: g.state.value for g in admission.open.values() if g.purpose is Purpose.TRAIN
        }
        for state, group_ids in (
            (GroupState.READY, list(replay.ready)),
            (GroupState.LEASED, [g.group_id for batch in replay.leases.values() for g in batch]),
        ):
            for group_id in group_ids:
                assert group_id not in memory
                memory[group_id] = state.value
        ended = {i: state for i, state in stored.items() if state in ("trained", "dropped")}
        assert not ended.keys() & memory.keys()
        assert {**memory, **ended} == stored

    @invariant()
    def no_prompt_is_skipped_or_issued_twice(self) -> None:
        with self.reading() as connection:
            positions = [
                row[0]
                for row in connection.execute(
                    "SELECT position FROM groups WHERE purpose='train' ORDER BY position"
                )
            ]
        assert positions == list(range(self.admission.next_index))

    @invariant()
    def the_surviving_history_trains_each_group_once(self) -> None:
        with self.reading() as connection:
            rows = connection.execute(
                "SELECT version, group_id FROM trained JOIN steps USING (step_id) WHERE undone_s IS"
                " NULL ORDER BY version, group_id"
            ).fetchall()
            trained = {
                row[0]
                for row in connection.execute("SELECT group_id FROM groups WHERE state='trained'")
            }
        assert sorted(group_id for _, group_id in rows) == sorted(trained)
        assert rows == [
            (step, i) for step, batch in enumerate(self.history, start=1) for i in sorted(batch)
        ]

    @invariant()
    def nothing_trained_is_over_age(self) -> None:
        decisive = (
            "oldest_version"
            if self.config.buffer.age_rule != "mask" or not self.has_gone_back
            else "newest_version"
        )
        with self.reading() as connection:
            worst = connection.execute(
                f"SELECT max(train_version - {decisive}) FROM groups WHERE state IN ('trained',"
                " 'leased')"
            ).fetchone()[0]
        assert worst is None or worst <= self.config.buffer.max_staleness_versions

    @invariant()
    def every_trained_token_has_the_exact_age_that_was_asked_for(self) -> None:
        is_exact = self.config.buffer.age_rule == "exact"
        if not is_exact or self.has_gone_back or self.has_dropped_batch:
            return
        age = self.config.buffer.max_staleness_versions
        with self.reading() as connection:
            rows = connection.execute(
                "SELECT train_version, oldest_version, newest_version FROM groups WHERE state IN"
                " ('trained', 'leased')"
            ).fetchall()
        for version, oldest, newest in rows:
            assert oldest == newest == max(0, version - age)

    @invariant()
    def nothing_is_wasted_by_age_as_long_as_the_learner_does_not_go_back(self) -> None:
        assert self.has_gone_back or self.service.state.drops["over_age"] == 0

    @rule()
    def the_audit_of_the_whole_history_is_clean(self) -> None:
        with reading(self.directory / "store.sqlite") as connection:
            assert audit(connection, promise_of(self.config)).problems == []

    def reading(self) -> Any:
        return _Reading(self.directory / "store.sqlite")

    # ---- and it always goes on

    def step_all(self) -> None:
        """Everyone does its work once."""
        for generator in self.generators.values():
            if generator.version != self.learner.version:
                generator.version = self.learner.version
                generator.held = [
                    (ticket, min(first, generator.version)) for ticket, first in generator.held
                ]
            self.ask_for_work(generator.name, 4, False, None)
            while generator.held:
                self.put(generator.name, 0, False, None, 0)
        self.take(None)
        self.commit(False, None)

    @rule(name=GENERATORS, num_unfinished=st.integers(1, 3))
    def train_and_push_in_the_middle_of_responses(self, name: str, num_unfinished: int) -> None:
        """Some responses end on newer weights than they began with, if the learner may train."""
        generator = self.generators[name]
        self.ask_for_work(name, 4, False, None)
        while len(generator.held) > num_unfinished:
            self.put(name, 0, False, None, 0)
        self.take(None)
        self.commit(False, None)
        self.push(name, 0)
        while generator.held:
            self.put(name, 0, False, None, 0)
        self.take(None)

    @precondition(lambda self: self.generators)
    @rule()
    def three_more_steps_are_always_possible(self) -> None:
        wanted = self.learner.version + 3
        for _ in range(100):
            self.step_all()
            if self.learner.version >= wanted:
                return
        raise AssertionError(
            f"stuck at version {self.learner.version}: {self.service.state.queue()}"
        )

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            try:
                self.three_more_steps_are_always_possible()
                self.the_audit_of_the_whole_history_is_clean()
            finally:
                self.run(self.store.__aexit__())
                self.loop.close()
                shutil.rmtree(self.directory)


class _Reading:
    """A read-only connection for one block."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> sqlite3.Connection:
        self._connection = sqlite3.connect(self._path)
        return self._connection

    def __exit__(self, *_: object) -> None:
        self._connection.close()


async def _end(task: asyncio.Task[Message]) -> None:
    await asyncio.gather(task, return_exceptions=True)


TestBuffer = BufferMachine.TestCase
TestBuffer.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
