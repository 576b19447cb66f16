"""The finished training groups: ready ones, leased batches, and which groups make the next batch.

Pure: no clock, socket or randomness; the buffer's service calls it and stores what it decides.
Invariants
- Batches are taken in the order of their train_version; the same train_version always gives the
  same groups until it is committed, also after the learner or the buffer came back from a crash (a
  batch once leased stays planned for that version).
- A batch holds groups_per_step groups, oldest admission first, each with at least one token within
  the staleness bound.
- A younger group may overtake an unfinished older one only if the older one, trained in its turn
  afterwards, is still within the bound. So nothing is over-age for having been skipped; with
  max_staleness=0 nothing is ever skipped.

Why waiting cannot deadlock.  A batch waits only for open groups. A generating one ends by its put,
its failure, or the loss of its generator (lease time or time of a group over). An issued one goes
out first; as the oldest it has only leased batches ahead of it, so the gate opens for it at the
latest when these are committed and a generator holds weights within max_staleness versions of the
learner's. When groups are dropped instead, fewer than (max_staleness + 1) x groups_per_step are
active and new ones are admitted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from async_rl.core.errors import ProtocolError, StalenessError
from async_rl.core.types import NO_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """One finished group. Versions are those of its trained tokens; planned: the train_version it
    was once leased for, or NO_VERSION.
    """

    group_id: int
    oldest_version: int
    newest_version: int
    planned: int = NO_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """An open group as the choice of a batch sees it: none of its tokens will be older than
    `version`.
    """

    group_id: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """Outcome of one attempt to take a batch: its group ids, or empty and why; over-age groups were
    dropped either way.
    """

    group_ids: tuple[int, ...]
    dropped: tuple[int, ...] = ()
    waits_for: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """What a learner's start changed: batches that its checkpoint had already trained, and groups
    that are ready again.
    """

    trained: tuple[tuple[int, tuple[int, ...]], ...]
    returned: tuple[int, ...]


def _order(group: StoredGroup) -> tuple[bool, int, int]:
    return group.planned == NO_VERSION, group.planned, group.group_id


class Replay:
    """Ready and leased groups, and the learner's version as committed."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness_versions: int,
        over_age: Literal["drop", "mask"],
    ) -> None:
        self.learner_version = 0
        self.ready: dict[int, StoredGroup] = {}
        self.leases: dict[int, tuple[StoredGroup, ...]] = {}
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness_versions
        self._over_age = over_age

    def restore(
        self, *, learner_version: int, ready: Iterable[StoredGroup], leased: Iterable[StoredGroup]
    ) -> None:
        """Takes over what the store knows; leased groups are planned for the version they are
        leased for.
        """
        self.learner_version = learner_version
        self.ready = {group.group_id: group for group in ready}
        batches: dict[int, list[StoredGroup]] = {}
        for group in sorted(leased, key=lambda g: g.group_id):
            batches.setdefault(group.planned, []).append(group)
        self.leases = {version: tuple(batches[version]) for version in sorted(batches)}

    @property
    def num_leased(self) -> int:
        """Groups with the learner."""
        return sum(map(len, self.leases.values()))

    @property
    def next_train_version(self) -> int:
        """The version whose batch is taken next."""
        return self.learner_version + len(self.leases)

    def stored_before(self, group_id: int | None) -> int:
        """Leased and ready groups that are trained before an unplanned group with this id; all of
        them for None.
        """
        if group_id is None:
            return self.num_leased + len(self.ready)
        return self.num_leased + sum(
            1 for g in self.ready.values() if g.planned != NO_VERSION or g.group_id < group_id
        )

    def put(self, group: StoredGroup) -> None:
        """The group is ready to be taken."""
        self.ready[group.group_id] = group

    def take(self, train_version: int, unfinished: Iterable[Unfinished]) -> Take:
        """Lease the batch to be trained on weights of `train_version`. Raises ProtocolError if it
        is not that version's turn.
        """
        if train_version in self.leases:
            return Take(group_ids=tuple(group.group_id for group in self.leases[train_version]))
        if train_version != self.next_train_version:
            raise ProtocolError(
                f"batch {train_version} was asked for, but the learner is at"
                f" {self.learner_version}, {len(self.leases)} batches leased; after a restart it"
                " must say SyncVersion first"
            )
        dropped = tuple(
            g.group_id for g in self.ready.values() if self._is_over_age(g, train_version)
        )
        for group_id in dropped:
            del self.ready[group_id]
        if len(self.ready) < self._groups_per_step:
            return Take(group_ids=(), dropped=dropped, waits_for=self._too_few(train_version))
        chosen, reason = self._choose(train_version, unfinished)
        if reason:
            return Take(group_ids=(), dropped=dropped, waits_for=reason)
        self.leases[train_version] = tuple(
            replace(self.ready.pop(g.group_id), planned=train_version) for g in chosen
        )
        return Take(group_ids=tuple(group.group_id for group in chosen), dropped=dropped)

    def commit(self, version: int, group_ids: Sequence[int]) -> tuple[StoredGroup, ...]:
        """Step `version` is done; the groups it trained, none if it was known. Raises ProtocolError
        or StalenessError if it cannot be.
        """
        if version <= self.learner_version:
            return ()
        batch = self.leases.get(version - 1)
        if version != self.learner_version + 1 or batch is None:
            raise ProtocolError(
                f"step {version} cannot be committed: the buffer is at {self.learner_version},"
                f" leased are {sorted(self.leases)}"
            )
        if {g.group_id for g in batch} != set(group_ids) or len(batch) != len(group_ids):
            raise ProtocolError(
                f"step {version} reports groups {sorted(group_ids)}, its lease is"
                f" {sorted(g.group_id for g in batch)}"
            )
        over = [g.group_id for g in batch if self._is_over_age(g, version - 1)]
        if over:
            raise StalenessError(
                f"step {version} trained groups {over}, which are older than {self._max_staleness}"
                " versions"
            )
        self.learner_version = version
        return self.leases.pop(version - 1)

    def sync(self, version: int, undone: Sequence[StoredGroup]) -> Sync:
        """The learner starts at `version`. undone: groups of later steps, planned for the version
        they were trained on.

        Batches leased for earlier versions are trained (the learner's checkpoint holds them), all
        others are ready again and stay planned. Raises ProtocolError if the learner is ahead of
        batches that were never leased.
        """
        trained = []
        if version > self.learner_version:
            missing = [v for v in range(self.learner_version, version) if v not in self.leases]
            if missing:
                raise ProtocolError(
                    f"the learner starts at version {version}, but the store has no batch for"
                    f" {missing}; are both of one run?"
                )
            trained = [(v + 1, self.leases.pop(v)) for v in range(self.learner_version, version)]
        returned = [group for batch in self.leases.values() for group in batch] + list(undone)
        self.leases.clear()
        self.ready.update((group.group_id, group) for group in returned)
        self.learner_version = version
        return Sync(
            trained=tuple((step, tuple(g.group_id for g in batch)) for step, batch in trained),
            returned=tuple(group.group_id for group in returned),
        )

    def _is_over_age(self, group: StoredGroup, train_version: int) -> bool:
        """Whether the group cannot be trained: any token over age, or all of them where over-age
        tokens are masked.
        """
        decisive = group.oldest_version if self._over_age == "drop" else group.newest_version
        return train_version - decisive > self._max_staleness

    def _choose(
        self, train_version: int, unfinished: Iterable[Unfinished]
    ) -> tuple[list[StoredGroup], str]:
        """The oldest ready groups, and why they may not be taken yet (empty if they may)."""
        chosen = sorted(
            heapq.nsmallest(self._groups_per_step, self.ready.values(), key=_order),
            key=lambda g: g.group_id,
        )
        youngest = max((g.group_id for g in chosen if g.planned == NO_VERSION), default=-1)
        skipped = sorted((u for u in unfinished if u.group_id < youngest), key=lambda u: u.group_id)
        for rank, group in enumerate(skipped):
            if (
                train_version + 1 + rank // self._groups_per_step - group.version
                > self._max_staleness
            ):
                return (
                    [],
                    (
                        f"group {group.group_id}, which is still generated and would be over age"
                        f" after step {train_version + 1}"
                    ),
                )
        return chosen, ""

    def _too_few(self, train_version: int) -> str:
        return (
            f"{len(self.ready)} of {self._groups_per_step} groups are ready for step"
            f" {train_version + 1}"
        )
