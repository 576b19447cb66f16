"""The buffer's state and its store agree, and no group is lost, over interleavings of requests,
results, losses, takes, commits and restarts, with every rule of age.

The generators and the learner are honest but unreliable: replies get lost, results come twice or
late, and all may be killed between two requests. tests/world kills them in the middle of a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from buffer_support import (
    Clock,
    FakePrompts,
    commit,
    evaluate,
    forget,
    make_config,
    make_group,
    opened,
    problems,
    sync,
    take,
    tickets,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from async_rl.core.heads import pack_group
from async_rl.core.types import DropReason, Group, Purpose, Ticket
from async_rl.protocol.buffer import FailGroup, PutGroup
from async_rl.protocol.learner import DropBatch, SetAside

T = TypeVar("T")
SHARED_MEMORY = Path("/dev/shm")
GENERATORS = st.sampled_from(("generator-0", "generator-1"))
CHOICES = st.integers(min_value=0, max_value=99)
TRAINED = (
    "SELECT version, group_id FROM trained JOIN steps USING (step_id) WHERE undone_s IS NULL ORDER"
    " BY 1, 2"
)
AGES = (
    "SELECT train_version, oldest_version, newest_version FROM groups WHERE state IN ('trained',"
    " 'leased')"
)


@dataclass
class FakeGenerator:
    """Tickets with the version that their first token was sampled with."""

    name: str
    life: int = 0
    version: int = 0
    held: list[tuple[Ticket, int]] = field(default_factory=list)


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
    def start(self, **kinds: Any) -> None:
        self.loop = asyncio.new_event_loop()
        folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        self.directory = Path(tempfile.mkdtemp(prefix="buffer-", dir=folder))
        self.config = make_config(group_size=1, **kinds)
        self.clock = Clock()
        self.generators = {f"generator-{n}": FakeGenerator(f"generator-{n}") for n in (0, 1)}
        self.learner = FakeLearner()
        self.late: list[Group] = []
        self.history: list[list[int]] = []
        self.num_lives = 0
        self.has_gone_back = False
        self.has_dropped_batch = False
        self.open_buffer()

    def open_buffer(self) -> None:
        prompts = FakePrompts(num_train=4, num_held_out=2)
        self.life = opened(self.directory, self.config, prompts, self.clock)
        self.service = self.run(self.life.__aenter__())

    def close_buffer(self) -> None:
        self.run(self.life.__aexit__(None, None, None))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

    @rule()
    def restart_buffer(self) -> None:
        self.close_buffer()
        self.open_buffer()

    # ---- generators

    @rule(name=GENERATORS, credit=st.integers(0, 4), is_lost=st.booleans())
    def ask_for_work(self, name: str, credit: int, is_lost: bool = False) -> None:
        generator = self.generators[name]
        known = {ticket.group_id: ticket.attempt for ticket, _ in generator.held}
        given = self.run(
            tickets(
                self.service,
                generator.version,
                generator=name,
                incarnation=f"life-{generator.life}",
                credit=credit,
                held=list(known),
            )
        )
        if not is_lost:
            assert len(given) <= credit
            new = [t for t in given if known.get(t.group_id) != t.attempt]
            assert all(t.admitted_version <= generator.version for t in new)
            generator.held.extend((ticket, generator.version) for ticket in new)

    @rule(name=GENERATORS, lag=st.integers(0, 2))
    def push(self, name: str, lag: int = 0) -> None:
        """A push of the newest version or a late one; never back, except after the learner went
        back.
        """
        generator = self.generators[name]
        wanted = max(self.learner.version - lag, 0)
        if wanted > generator.version or (lag == 0 and wanted < generator.version):
            generator.version = wanted
            generator.held = [(ticket, min(first, wanted)) for ticket, first in generator.held]

    @rule(name=GENERATORS, which=CHOICES, twice=st.booleans(), spread=st.integers(0, 3))
    def put(self, name: str, which: int = 0, twice: bool = False, spread: int = 0) -> None:
        generator = self.generators[name]
        if not generator.held:
            return
        ticket, first = generator.held.pop(which % len(generator.held))
        newest = max(first, generator.version)
        versions = sorted({first, max(first, generator.version - spread), newest})
        group = make_group(ticket, versions=versions, generator=name)
        for _ in range(1 + twice):
            self.run(self.service.put_group(PutGroup(payload=pack_group(group))))

    @rule(which=CHOICES)
    def put_late(self, which: int) -> None:
        """A result whose generator was killed."""
        if self.late:
            group = self.late.pop(which % len(self.late))
            self.run(self.service.put_group(PutGroup(payload=pack_group(group))))

    @rule(name=GENERATORS, which=CHOICES, is_untrainable=st.booleans())
    def fail(self, name: str, which: int, is_untrainable: bool) -> None:
        generator = self.generators[name]
        if not generator.held:
            return
        ticket, _ = generator.held.pop(which % len(generator.held))
        if is_untrainable:
            group = make_group(ticket, trained=False, generator=name)
            self.run(self.service.put_group(PutGroup(payload=pack_group(group))))
            return
        request = FailGroup(
            group_id=ticket.group_id,
            attempt=ticket.attempt,
            reason=DropReason.SCORING_FAILED,
            message="",
        )
        self.run(self.service.fail_group(request))

    @rule(name=GENERATORS, is_told=st.booleans(), leaves_late=st.booleans())
    def kill_generator(self, name: str, is_told: bool, leaves_late: bool) -> None:
        generator = self.generators[name]
        if leaves_late:
            self.late.extend(
                make_group(ticket, versions=[first], generator=name)
                for ticket, first in generator.held
            )
        if is_told:
            self.service.lose(name, "its process ended")
            self.run(self.service.store.flush())
        generator.held = []
        generator.life += 1
        generator.version = self.learner.version

    @rule(seconds=st.sampled_from([1.0, 31.0, 151.0]), alive=st.sets(GENERATORS))
    def let_time_pass(self, seconds: float, alive: set[str]) -> None:
        self.clock.now += seconds
        assert self.service.expire(sorted(alive)) > 0
        self.run(self.service.store.flush())

    # ---- the learner

    @rule()
    def take(self) -> None:
        """One batch ahead of training, or the one to be trained now again."""
        learner = self.learner
        wanted = learner.version if learner.version not in learner.batches else learner.version + 1
        reply = self.run(take(self.service, wanted))
        group_ids = [group.group_id for group in reply.groups]
        if wanted in learner.batches:
            assert group_ids == learner.batches[wanted]
        elif group_ids:
            assert len(group_ids) == self.config.buffer.groups_per_step
            learner.batches[wanted] = group_ids

    @rule(twice=st.booleans())
    def commit(self, twice: bool = False) -> None:
        learner = self.learner
        if learner.version not in learner.batches:
            return
        trained = learner.batches.pop(learner.version)
        self.history = [*self.history[: learner.version], trained]
        learner.version += 1
        for _ in range(1 + twice):
            self.run(commit(self.service, learner.version, trained))

    @rule(twice=st.booleans())
    def drop_batch(self, twice: bool) -> None:
        """It cannot be trained."""
        learner = self.learner
        if learner.version not in learner.batches:
            return
        ids = learner.batches[learner.version]
        request = DropBatch(train_version=learner.version, group_ids=ids, message="loss nan")
        for _ in range(1 + twice):
            reply = self.run(self.service.drop_batch(request))
            assert isinstance(reply, SetAside)
            assert reply.num_batches >= 1
        self.has_dropped_batch = True
        learner.batches = {}

    @rule(forgets=st.booleans())
    def save(self, forgets: bool) -> None:
        learner = self.learner
        if learner.version not in learner.kept:
            learner.kept = [*learner.kept, learner.version][-2:]
        if forgets:
            self.run(forget(self.service, learner.kept[0]))

    @rule(saved_first=st.booleans(), is_damaged=st.booleans())
    def kill_learner(self, saved_first: bool, is_damaged: bool) -> None:
        """Return to its checkpoint, which may hold one step that it had no time to commit, or to
        the previous checkpoint if it is damaged.
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
        self.run(sync(self.service, learner.version, f"life {self.num_lives}"))

    @rule()
    def evaluate(self) -> None:
        self.run(evaluate(self.service, self.learner.version))

    # ---- what must hold

    def rows(self, query: str) -> list[Any]:
        with contextlib.closing(sqlite3.connect(self.directory / "store.sqlite")) as connection:
            return connection.execute(query).fetchall()

    @invariant()
    def active_groups_are_within_the_bound(self) -> None:
        admission = self.service.state.admission
        buffer = self.config.buffer
        most = (buffer.max_staleness_versions + 1) * buffer.groups_per_step
        assert self.has_gone_back or admission.num_active <= most

    @invariant()
    def memory_and_store_agree_and_every_group_is_in_one_state(self) -> None:
        stored = dict(self.rows("SELECT group_id, state FROM groups WHERE purpose='train'"))
        admission, replay = self.service.state.admission, self.service.state.replay
        leased = [group.group_id for batch in replay.leases.values() for group in batch]
        memory = [
            *((g.group_id, g.state) for g in admission.open.values() if g.purpose is Purpose.TRAIN),
            *((group_id, "ready") for group_id in replay.ready),
            *((group_id, "leased") for group_id in leased),
            *((i, state) for i, state in stored.items() if state in ("trained", "dropped")),
        ]
        assert len(memory) == len(stored)
        assert dict(memory) == stored

    @invariant()
    def no_prompt_is_skipped_or_issued_twice(self) -> None:
        rows = self.rows("SELECT position FROM groups WHERE purpose='train' ORDER BY position")
        assert [row[0] for row in rows] == list(range(self.service.state.admission.next_index))

    @invariant()
    def the_surviving_history_trains_each_group_once(self) -> None:
        expected = [
            (step, i) for step, batch in enumerate(self.history, start=1) for i in sorted(batch)
        ]
        rows = self.rows(TRAINED)
        assert rows == expected
        trained = self.rows("SELECT group_id FROM groups WHERE state='trained' ORDER BY 1")
        assert trained == sorted((group_id,) for _, group_id in rows)

    @invariant()
    def nothing_trained_has_another_age_than_allowed(self) -> None:
        buffer = self.config.buffer
        is_exact = buffer.age_rule == "exact" and not self.has_gone_back
        for version, oldest, newest in self.rows(AGES):
            decisive = newest if buffer.age_rule == "mask" and self.has_gone_back else oldest
            assert version - decisive <= buffer.max_staleness_versions
            if is_exact and not self.has_dropped_batch:
                assert oldest == newest == max(0, version - buffer.max_staleness_versions)

    @invariant()
    def nothing_is_wasted_by_age_as_long_as_the_learner_does_not_go_back(self) -> None:
        assert self.has_gone_back or self.service.state.drops["over_age"] == 0

    # ---- and it always goes on

    @rule(name=GENERATORS, num_unfinished=st.integers(1, 3))
    def train_and_push_in_the_middle_of_responses(self, name: str, num_unfinished: int) -> None:
        """Some responses finish on newer weights than they started with, if the learner may
        train.
        """
        generator = self.generators[name]
        self.ask_for_work(name, 4)
        while len(generator.held) > num_unfinished:
            self.put(name)
        self.take()
        self.commit()
        self.push(name)
        while generator.held:
            self.put(name)
        self.take()

    @rule()
    def three_more_steps_are_always_possible(self) -> None:
        wanted = self.learner.version + 3
        for _ in range(100):
            for generator in self.generators.values():
                self.push(generator.name)
                self.ask_for_work(generator.name, 4)
                while generator.held:
                    self.put(generator.name)
            self.take()
            self.commit()
            if self.learner.version >= wanted:
                return
        raise AssertionError(
            f"stuck at version {self.learner.version}: {self.service.state.queue()}"
        )

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            try:
                self.three_more_steps_are_always_possible()
                assert problems(self.directory, self.config) == []
            finally:
                self.close_buffer()
                self.loop.close()
                shutil.rmtree(self.directory)


TestBuffer = BufferMachine.TestCase
TestBuffer.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
