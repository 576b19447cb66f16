"""What happened in a world, and the promises that it must not break."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from typing import Any

from gateway import ids_in
from loop import CURRENT, Process

from async_rl.batching.batch import BatchPart
from async_rl.buffer.store.audit import Promise, audit
from async_rl.buffer.store.connection import STORE_FILE
from async_rl.core.types import Trajectory
from async_rl.protocol.buffer import PutGroup
from async_rl.protocol.learner import CommitStep, FromLearner, SyncVersion
from async_rl.protocol.membership import Expel

EXCUSED = ("the world made this batch bad",)
"""Causes of a failed run that the world made on purpose, as often as the product bears."""


@dataclass
class Trained:
    """One step of one life. oldest, newest: versions among its tokens."""

    life: Process | None
    version: int
    identity: int
    groups: list[int]
    oldest: int
    newest: int


@dataclass
class Token:
    """A token that an engine wrote for a gateway. session: group, sample."""

    session: tuple[str, str]
    identity: int
    version: int
    logprob: float


class History:
    """Events of one world."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self.steps: list[Trained] = []
        self.acknowledged: set[tuple[int, int]] = set()
        self.committed: list[tuple[int, list[int]]] = []
        self.expelled: list[str] = []
        self.identities: dict[int, list[int]] = {}
        self.saves: list[int] = []
        self.problems: list[str] = []
        self.tokens: dict[int, Token] = {}
        self.began: dict[int, float] = {}
        self.served: dict[str, set[int]] = {}

    # ---- events

    def written(self, request_id: str, identity: int, version: int, count: int) -> list[int]:
        """An engine wrote tokens; return their ids."""
        call = request_id.partition("/")[0].split(".")
        session = call[-3], call[-1]
        first = 10 + len(self.tokens)
        for id in range(first, first + count):
            self.tokens[id] = Token(session, identity, version, -(id % 97 + 1) / 128)
        return list(range(first, first + count))

    def sent(self, key: str, body: bytes) -> None:
        """A gateway sent a part of an answer to the agent with this key."""
        served = self.served.setdefault(key, set())
        served.update(ids_in(body))
        sessions = {self.tokens[id].session for id in served}
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
        versions = [int(v) for t in part.trajectories for v in t.versions[t.loss_mask]]
        groups = [head.group_id for head in part.heads]
        if self.tokens:
            for trajectory in part.trajectories:
                self._trains_what_was_served(version, trajectory)
        self.steps.append(
            Trained(CURRENT.get(), version, identity, groups, min(versions), max(versions))
        )

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

    def published(self, version: int, identity: int) -> None:
        self.identities.setdefault(version, []).append(identity)

    def saved(self, version: int) -> None:
        self.saves.append(version)

    def loads(self, newest_life: int, life: int) -> None:
        """An engine with weights of `newest_life` of the learner loads those of `life`."""
        if life < newest_life:
            self._broken(f"a generator takes weights of life {life} after those of {newest_life}")

    def called(self, name: str, request: Any, reply: Any, sent_s: float) -> None:
        """A process received the answer to its request."""
        if isinstance(request, SyncVersion):
            self.began.setdefault(reply.life, self._world.loop.time())
        elif isinstance(request, FromLearner):
            later = [life for life, at_s in self.began.items() if at_s < sent_s]
            if later and max(later) > request.life:
                kind = type(request).__name__
                self._broken(f"{kind} of life {request.life} is accepted after life {max(later)}")
        if isinstance(request, PutGroup):
            self.acknowledged.add((request.group.group_id, request.group.attempt))
        elif isinstance(request, CommitStep):
            self.committed.append((request.version, list(request.group_ids)))
        elif isinstance(request, Expel):
            self.expelled.append(f"{request.name}: {request.reason}")

    def _broken(self, text: str) -> None:
        self.problems.append(f"{self._world.loop.time():.3f} s: {text}")

    # ---- the end

    def check(self) -> list[str]:
        """Return the promises that are broken, each as a sentence."""
        world = self._world
        problems = list(self.problems)
        if world.codes[-1] != 0 and not any(cause in world.cause for cause in EXCUSED):
            problems.append(f"the run has failed: exit codes {world.codes}")
        path = world.run_dir / STORE_FILE
        connection = sqlite3.connect(path)
        try:
            config = world.config
            promise = Promise(
                max_staleness_versions=config.buffer.max_staleness_versions,
                groups_per_step=config.buffer.groups_per_step,
                age_rule=config.buffer.age_rule,
            )
            problems += audit(connection, promise).problems
            problems += self._ledger_equals_history(connection)
        finally:
            connection.close()
        return problems

    def _ledger_equals_history(self, connection: sqlite3.Connection) -> list[str]:
        problems = []
        rows = connection.execute(
            "SELECT steps.version, group_id FROM trained JOIN steps USING (step_id) WHERE undone_s"
            " IS NULL ORDER BY steps.version, group_id"
        ).fetchall()
        ledger: dict[int, list[int]] = {}
        for version, group_id in rows:
            ledger.setdefault(version, []).append(group_id)
        # Of each life: one that was replaced may run on, and train what the buffer refuses.
        newest = {(step.version + 1, step.life): sorted(step.groups) for step in self.steps}
        for version, groups in ledger.items():
            trained = [last for (of, _), last in newest.items() if of == version]
            if groups not in trained:
                problems.append(
                    f"step {version} of the ledger has the groups {groups}, the learner trained"
                    f" {trained} last"
                )
        problems += self._evaluations_of_their_weights(connection, ledger)
        known = {row[0] for row in connection.execute("SELECT group_id FROM groups")}
        lost = {group for group, _ in self.acknowledged} - known
        if lost:
            problems.append(f"groups {sorted(lost)} were acknowledged and are not in the store")
        return problems

    def _evaluations_of_their_weights(
        self, connection: sqlite3.Connection, ledger: dict[int, list[int]]
    ) -> list[str]:
        """No sample of an evaluation was drawn from weights before those that it is about. Gateways
        break this when a generator with older weights joins (README.md).
        """
        problems: list[str] = []
        if self.tokens:
            return problems
        identities = {step.version + 1: step.identity for step in self.steps}
        for version, figures in connection.execute(
            "SELECT version, figures FROM evaluations WHERE figures IS NOT NULL"
        ):
            lowest = json.loads(figures).get("eval/reward_mean")
            expected = identities.get(version, 0) if version in ledger or version == 0 else 0
            if lowest is not None and lowest < expected:
                problems.append(
                    f"the evaluation of version {version} has samples of weights {lowest:.1f} on"
                    f" average; its own are {expected}"
                )
        return problems
