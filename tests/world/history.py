"""What happened in a world, and the promises that it must not break."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ending
from ending import Answers, Written
from gateway import ids_in
from loop import Process, current

from async_rl.batching.batch import BatchPart
from async_rl.buffer.store.connection import STORE_FILE, connect
from async_rl.buffer.store.ledger import audit
from async_rl.config.pools import pool_of
from async_rl.core.checksums import damage
from async_rl.core.types import Trajectory
from async_rl.protocol.buffer import (
    CommitStep,
    ForgetBefore,
    FromLearner,
    GetHistory,
    PutGroup,
    RequestWork,
    SecureStore,
    SyncVersion,
)
from async_rl.protocol.generator import Drain
from async_rl.protocol.supervisor import Expel
from async_rl.runs.status import config_of
from async_rl.training import checkpoints
from async_rl.training.mirror import Mirror

EXCUSED = ("the world made this batch bad",)
"""Causes of a failed run that the world made on purpose, as often as the product bears."""
SHORT_CUT_S = 5.0
"""A third of the silence after which a process is started again."""
Steps = dict[int, list[int]]


@dataclass
class Trained:
    """One step of one life."""

    life: Process
    version: int
    identity: int
    groups: list[int]


@dataclass
class Token:
    """A token that an engine wrote for a gateway."""

    call: Written
    identity: int
    version: int
    logprob: float


class History:
    """Events of one world."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self.steps: list[Trained] = []
        self.acknowledged: set[tuple[int, int]] = set()
        self.committers: dict[int, Process] = {}
        self.expelled: list[str] = []
        self.saves: list[int] = []
        self.problems: list[str] = []
        self.tokens: dict[int, Token] = {}
        self.began: dict[int, float] = {}
        self.served: dict[str, set[int]] = {}
        self.answers = Answers()
        self.lives: dict[int, str] = {}
        self.drained: dict[Process, float] = {}
        self.secured: set[tuple[int, int]] = set()
        self.refusal = ""
        self._complete = self._mirrored = -1
        self._saved_s: dict[int, float] = {}
        self._num_saves = 0
        self._rows_before = self._secured_rows = self._mirrored_rows = 0
        self._newest_start = 0

    # ---- events

    def lost_power(self) -> None:
        """What was acknowledged since the last checkpoint may be gone."""
        self.acknowledged &= self.secured
        # The number of a life that was not on the disk is free.
        self.lives.clear()
        self._complete = max(self.saves, default=-1)
        self._num_saves = len(self.saves)

    def restarted(self) -> None:
        """The machine runs again: each copy of a checkpoint with its mark can be resumed."""
        world = self._world
        # What was written in the moment of the loss.
        del self.saves[self._num_saves :]
        rows = _rows(world.run_dir)
        if rows < self._secured_rows:
            self._broken(f"{self._secured_rows} rows of metrics were on the disk, {rows} are left")
        url = world.config.checkpoint.mirror
        if url is None:
            return
        copies = Mirror(url, world.run_dir)
        found = copies.versions()
        if self._mirrored > max(found, default=-1):
            self._broken(f"the copy of checkpoint {self._mirrored} is lost; there are {found}")
        for version in found:
            copy = Path(url) / "run" / checkpoints.directory_of(Path(), version).name
            if damage(copy):
                self._broken(f"the copy of checkpoint {version} is damaged: {damage(copy)}")
        if found:
            fetched = world.path / "fetched" / "run"
            Mirror(url, fetched).fetch()
            config_of(fetched)
            _, problems = checkpoints.choose(fetched, first=0, last=found[-1])
            connection = sqlite3.connect(fetched / STORE_FILE)
            last = _one(connection, "SELECT max(version) FROM steps WHERE undone_s IS NULL")
            connection.close()
            if problems or (last or 0) < found[-1]:
                self._broken(f"the copy cannot be resumed: {problems}, ledger up to step {last}")
            rows = _rows(fetched)
            if found[-1] == self._mirrored and rows < self._mirrored_rows:
                self._broken(f"the copy has {rows} rows of metrics of {self._mirrored_rows}")
            shutil.rmtree(fetched)

    def damaged(self, version: int) -> None:
        """A checkpoint can no longer be read."""
        self.saves = [saved for saved in self.saves if saved != version]
        self._complete = min(self._complete, version - 1)
        self._mirrored = min(self._mirrored, version - 1)

    def refused(self, reason: str) -> None:
        """The run could not be resumed."""
        self.refusal = reason
        if self._complete >= 0:
            self._broken(f"the run has checkpoint {self._complete} and is refused: {reason}")

    def resumed(self, config: Any) -> None:
        if config != self._world.config:
            self._broken("the run was resumed with another configuration")

    def started(self, version: int) -> None:
        """The learner starts from this version."""
        self._newest_start = version
        # A checkpoint that a power loss left, although it was not known to be complete.
        if version > max(self.saves, default=0):
            self.saves.append(version)
        # What was complete before this life looked, or before the power was lost.
        if version < self._complete:
            self._broken(
                f"checkpoint {self._complete} was complete; the run resumes from {version}"
            )
        self._complete = -1

    def written(self, call: Written, identity: int, version: int, count: int) -> list[int]:
        """An engine wrote tokens; return their ids."""
        call.num_tokens += count
        first = 10 + len(self.tokens)
        for id in range(first, first + count):
            self.tokens[id] = Token(call, identity, version, -(id % 97 + 1) / 128)
        return list(range(first, first + count))

    def sent(self, key: str, body: bytes) -> None:
        """A gateway sent a part of an answer to the agent with this key."""
        served = self.served.setdefault(key, set())
        served.update(ids_in(body))
        for id in served:
            self.tokens[id].call.keys.add(key)
        sessions = {self.tokens[id].call.session for id in served}
        if len(sessions) > 1:
            self._broken(f"an agent was answered with tokens of the sessions {sessions}")

    def offered(self, version: int, part: BatchPart) -> None:
        """The trainer received a batch for this version."""
        bound = self._world.config.buffer.max_staleness_versions
        for trajectory in part.trajectories:
            versions = trajectory.versions[trajectory.loss_mask]
            if versions.max() > version:
                self._broken(
                    f"the batch of version {version} has a token of version {versions.max()}"
                )
            # With mask the learner leaves the older tokens out.
            if self._world.config.buffer.age_rule == "drop" and versions.min() < version - bound:
                self._broken(
                    f"the batch of version {version} has a token of version {versions.min()},"
                    f" the bound is {bound}"
                )

    def trained(self, version: int, identity: int, part: BatchPart) -> None:
        if self.tokens:
            for trajectory in part.trajectories:
                self._trains_what_was_served(version, trajectory)
        groups = [head.group_id for head in part.heads]
        self.steps.append(Trained(current(), version, identity, groups))

    def _trains_what_was_served(self, version: int, trajectory: Trajectory) -> None:
        """The trained tokens are those that one agent was sent, with their versions and log-probs,
        each once.
        """
        ids = trajectory.token_ids[trajectory.loss_mask].tolist()
        if len(set(ids)) < len(ids):
            self._broken(f"tokens are trained twice: {ids}")
        if set(ids) not in self.served.values():
            sent = [served for served in self.served.values() if served & set(ids)]
            self._broken(f"trains the tokens {sorted(ids)}; agents were sent {sent}")
        versions = trajectory.versions[trajectory.loss_mask].tolist()
        # Later versions are of weights that were discarded when the learner went back.
        if versions != [min(version, self.tokens[id].version) for id in ids]:
            self._broken(f"the tokens {ids} are trained with the versions {versions}")
        logprobs = trajectory.behavior_logprobs[trajectory.loss_mask].tolist()
        if logprobs != [self.tokens[id].logprob for id in ids]:
            self._broken(f"the tokens {ids} are trained with the log-probs {logprobs}")

    def saved(self, version: int) -> None:
        self.saves.append(version)
        self._saved_s.setdefault(version, self._world.loop.time())
        self._secured_rows = self._rows_before

    def loads(self, newest_life: int, life: int) -> None:
        """An engine with weights of `newest_life` of the learner loads those of `life`."""
        if life < newest_life:
            self._broken(f"a generator takes weights of life {life} after those of {newest_life}")

    def called(self, to: Process, request: Any, reply: Any, sent_s: float, made_s: float) -> None:
        """A process received the answer of another one to its request. made_s: first sent."""
        process = current()
        now_s = self._world.loop.time()
        if isinstance(request, FromLearner) and not isinstance(request, SyncVersion):
            later = [life for life, at_s in self.began.items() if at_s < sent_s]
            if later and max(later) > request.life:
                kind = type(request).__name__
                self._broken(f"{kind} of life {request.life} is accepted after life {max(later)}")
        match request:
            case SyncVersion():
                self.began.setdefault(reply.life, now_s)
                other = self.lives.setdefault(reply.life, request.incarnation)
                if other != request.incarnation:
                    self._broken(f"two lives of the learner have the number {reply.life}")
                self.started(request.version)
            case Drain():
                self.drained[to] = now_s
            case RequestWork():
                if request.credit > 0 and self.drained.get(process, made_s) < made_s:
                    self._broken(f"{request.generator} asks for work although it is to leave")
                late_s = now_s - self.drained.get(process, now_s)
                if reply.tickets and late_s > 0.5 and all(map(_loses_nothing, self._world.faults)):
                    groups = [ticket.group_id for ticket in reply.tickets]
                    self._broken(
                        f"{process.name} gets groups {groups} {late_s:.1f} s after a drain"
                    )
            case PutGroup(group=group):
                self.acknowledged.add((group.group_id, group.attempt))
            case CommitStep():
                self.committers[request.version] = process
            case GetHistory():
                # A life that was replaced may complete another one from now on.
                known = [v for v in self.saves if self._saved_s.get(v, 0.0) <= sent_s]
                self._complete = max(known, default=-1)
            case SecureStore():
                self._rows_before = _rows(self._world.run_dir)
            case ForgetBefore():
                # The learner sends it once the mirror has its newest checkpoint.
                self._mirrored = max(self.saves)
                self._mirrored_rows = self._rows_before
            case Expel():
                self.expelled.append(f"{request.name}: {request.reason}")

    def learned(self) -> None:
        """The learner has finished: long after a request to scale, the pools have its sizes."""
        world = self._world
        needs_s = world.config.timeouts.drain_s + world.config.timeouts.start_s
        for pool, (count, at_s) in world.scaled.items():
            living = [name for name, it in world.handles.items() if not it.process.is_dead]
            names = [name for name in living if pool_of(name) == pool]
            is_settled = world.loop.time() > needs_s + max(at_s, world.last_fault_s)
            if len(names) != count and is_settled:
                self._broken(f"{pool}={count} is wanted, at the end {sorted(names)} run")

    def _broken(self, text: str) -> None:
        self.problems.append(f"{self._world.loop.time():.3f} s: {text}")

    # ---- the end

    def check(self) -> list[str]:
        """Return the promises that are broken, each as a sentence."""
        world = self._world
        problems = list(self.problems)
        if self.refusal:
            return problems
        if world.codes[-1] != 0 and not any(cause in world.cause for cause in EXCUSED):
            problems.append(f"the run has failed: exit codes {world.codes}")
        with contextlib.closing(connect(world.run_dir / STORE_FILE)) as connection:
            problems += audit(connection, world.config.buffer).problems
            problems += self._ledger_equals_history(connection)
            problems += self._without_reason(connection)
            # A run that a person stopped has fewer steps.
            if any("the run has finished" in line for line in world.log):
                problems += ending.broken(connection, world)
                problems += self._rows_and_evaluations(connection)
                problems += self._checkpoints(connection)
            problems += self.answers.problems(connection)
        return problems

    def _without_reason(self, connection: sqlite3.Connection) -> Iterator[str]:
        """What the product may do after a fault only."""
        world = self._world
        went_back = _one(connection, "SELECT count(*) FROM lives") > 1
        over_age = _one(
            connection, "SELECT count(*) FROM groups WHERE reason='over_age' AND purpose='train'"
        )
        # The journal of a lost gateway may have answers that are too old by now.
        if over_age and not (went_back or self.tokens):
            yield f"{over_age} groups were over age although the learner never went back"
        restarts = [s for s in world.warnings("; restarting ") if "asked to be started" not in s]
        if restarts and not (world.kinds_of_faults or world.broken_loads):
            yield f"without a fault: {restarts[0]}"
        hit = {name for fault in world.faults for name in map(str, fault.arguments)}
        hit.update(*world.strikes.values())
        for text in self.expelled:
            name = text.partition(":")[0]
            if not (world.broken_loads or {name, "learner-0"} & hit):
                yield f"a healthy generator was removed: {text}"
        is_calm = all(map(_loses_nothing, world.faults)) and not world.cut_at_sync
        # A scripted agent ends when a request is refused, as where its tokens are used up.
        has_failed_agents = bool(world.warnings("agent_failed"))
        if is_calm and not (world.broken_loads or world.failed_verdicts or has_failed_agents):
            again = _one(connection, "SELECT count(*) FROM groups WHERE attempt > 1")
            if again:
                yield f"{again} groups were made more than once, and nothing was lost"

    def _rows_and_evaluations(self, connection: sqlite3.Connection) -> Iterator[str]:
        world, config = self._world, self._world.config
        steps = [json.loads(row)["step"] for row in world.rows]
        missing = set(range(1, config.num_steps + 1)) - set(steps)
        named = re.findall(r"\d+", " ".join(world.warnings("has no row for step ")))
        unnamed = [step for step in missing if f"{step}" not in named]
        if unnamed or steps != sorted(set(steps)):
            yield f"metrics.jsonl has rows of the steps {steps}; not named: {unnamed}"
        every = config.evaluation.every_steps
        if every:
            due = {*range(0, config.num_steps + 1, every), config.num_steps}
            # The run waits a minute for the last one, and a buffer that is ended meanwhile reports
            # it at the next resume.
            done = "SELECT version FROM evaluations WHERE figures IS NOT NULL OR started_s > ?"
            jumps = [fault.arguments for fault in world.faults if fault.kind == "jump"]
            back_s = sum(min(by_s, 0.0) for name, by_s in jumps if name == "buffer")
            since_s = world.loop.time() + 1.7e9 - 120.0 + back_s
            lacking = due - {version for (version,) in connection.execute(done, (since_s,))}
            if lacking:
                yield f"the versions {sorted(lacking)} were not evaluated"

    def _checkpoints(self, connection: sqlite3.Connection) -> Iterator[str]:
        """The newest are there, with the trajectories that a resume from the oldest would need."""
        config = self._world.config
        saved = checkpoints.versions(self._world.run_dir)
        keep = config.checkpoint.keep
        # A learner that starts from the last step saves nothing, so it deletes nothing either.
        most = keep + config.checkpoint.keep_best + int(self._newest_start == config.num_steps)
        if saved[-1:] != [config.num_steps] or len(saved) > most:
            yield f"at the end the run has the checkpoints {saved}"
        every = config.checkpoint.every_steps
        due = set(range(every, config.num_steps + 1, every)) if every else set()
        if due - set(self.saves):
            yield f"no checkpoint of the steps {sorted(due - set(self.saves))} was made"
        expected = sorted(set(self.saves))[-keep:]
        if saved[-len(expected) :] != expected:
            yield f"the newest checkpoints are {expected}, the run has {saved}"
        lost = _one(
            connection,
            "SELECT count(*) FROM groups WHERE state='trained' AND train_version >= ? AND group_id"
            " NOT IN (SELECT group_id FROM blobs)",
            saved[-keep:][0] - config.buffer.uses_per_group + 1,
        )
        if lost:
            yield f"{lost} groups that checkpoint {saved[-keep:][0]} needs are deleted"

    def _ledger_equals_history(self, connection: sqlite3.Connection) -> Iterator[str]:
        first = _surviving(connection, "trained")
        again = _surviving(connection, "reused")
        ledger = {step: sorted([*groups, *again.get(step, ())]) for step, groups in first.items()}
        yield from self._uses(connection, first, again)
        # Of each life: one that was replaced may run on, and train what the buffer refuses.
        newest = {(step.version + 1, step.life): sorted(step.groups) for step in self.steps}
        for version, groups in ledger.items():
            trained = [last for (of, _), last in newest.items() if of == version]
            if groups not in trained:
                yield (
                    f"step {version} of the ledger has the groups {groups}, the learner trained"
                    f" {trained} last"
                )
        # Gateways break this when a generator with older weights joins (README.md).
        if not self.tokens:
            yield from self._evaluations_of_their_weights(connection, ledger)
        known = {row[0] for row in connection.execute("SELECT group_id FROM groups")}
        lost = {group for group, _ in self.acknowledged} - known
        if lost:
            yield f"groups {sorted(lost)} were acknowledged and are not in the store"

    def _uses(self, connection: sqlite3.Connection, first: Steps, again: Steps) -> Iterator[str]:
        """Each step trained the groups of the steps before it once more, as long as they are within
        the bound.
        """
        buffer = self._world.config.buffer
        column = "oldest_version" if buffer.age_rule == "drop" else "newest_version"
        versions = dict(connection.execute(f"SELECT group_id, {column} FROM groups"))
        for step in first:
            before = [
                group
                for number in range(step - buffer.uses_per_group + 1, step)
                for group in first.get(number, ())
            ]
            young = [g for g in before if step - 1 - versions[g] <= buffer.max_staleness_versions]
            if sorted(young) != again.get(step, []):
                yield f"step {step} trained the groups {again.get(step, [])} again, not {young}"

    def _evaluations_of_their_weights(
        self, connection: sqlite3.Connection, ledger: Steps
    ) -> Iterator[str]:
        """No sample of an evaluation was drawn from weights before those that it is about."""
        # A life that was replaced trains steps that the buffer refuses.
        identities = {
            step.version + 1: step.identity
            for step in self.steps
            if step.life is self.committers.get(step.version + 1)
        }
        for version, figures in connection.execute(
            "SELECT version, figures FROM evaluations WHERE figures IS NOT NULL"
        ):
            lowest = json.loads(figures).get("eval/reward_mean")
            expected = identities.get(version, 0) if version in ledger or version == 0 else 0
            if lowest is not None and lowest < expected:
                yield (
                    f"the evaluation of version {version} has samples of weights {lowest:.1f} on"
                    f" average; its own are {expected}"
                )


def _loses_nothing(fault: Any) -> bool:
    """No process and no message is lost, and no silence leads to a restart."""
    if fault.kind == "cut":
        return bool(fault.arguments[-1] <= SHORT_CUT_S)
    return fault.kind in {"scale", "jump", "slow_disk"}


def _surviving(connection: sqlite3.Connection, table: str) -> Steps:
    """Return the groups by the step of the surviving history that the table has for them."""
    found: Steps = {}
    for version, group_id in connection.execute(
        f"SELECT version, group_id FROM {table} JOIN steps USING (step_id) WHERE undone_s IS NULL"
        " ORDER BY version, group_id"
    ):
        found.setdefault(version, []).append(group_id)
    return found


def _one(connection: sqlite3.Connection, query: str, *values: int) -> int:
    return int(connection.execute(query, values).fetchone()[0])


def _rows(run_dir: Path) -> int:
    """Complete rows of metrics."""
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0
