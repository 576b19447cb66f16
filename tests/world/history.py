"""What happened in a world, and the promises that it must not break."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from typing import Any

from async_rl.batching.batch import BatchPart
from async_rl.buffer.store.audit import Promise, audit
from async_rl.buffer.store.connection import STORE_FILE
from async_rl.protocol.buffer import PutGroup
from async_rl.protocol.learner import CommitStep
from async_rl.protocol.membership import Expel

EXCUSED = ("the world made this batch bad",)
"""Causes of a failed run that the world made on purpose, as often as the product bears."""


@dataclass
class Trained:
    """One step of one life. oldest, newest: versions among its tokens."""

    version: int
    identity: int
    groups: list[int]
    oldest: int
    newest: int


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

    # ---- events

    def offered(self, version: int, part: BatchPart) -> None:
        """The trainer received a batch for this version."""
        bound = self._world.config.buffer.max_staleness_versions
        for trajectory in part.trajectories:
            versions = trajectory.versions[trajectory.prompt_length :]
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
        versions = [int(v) for t in part.trajectories for v in t.versions[t.prompt_length :]]
        groups = [head.group_id for head in part.heads]
        self.steps.append(Trained(version, identity, groups, min(versions), max(versions)))

    def published(self, version: int, identity: int) -> None:
        self.identities.setdefault(version, []).append(identity)

    def saved(self, version: int) -> None:
        self.saves.append(version)

    def called(self, name: str, request: Any, reply: Any) -> None:
        """A process received the answer to its request."""
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
        newest = {step.version + 1: sorted(step.groups) for step in self.steps}
        for version, groups in ledger.items():
            if newest.get(version) != groups:
                problems.append(
                    f"step {version} of the ledger has the groups {groups}, the learner trained"
                    f" {newest.get(version)} last"
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
        """No sample of an evaluation was drawn from weights before those that it is about."""
        problems = []
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
