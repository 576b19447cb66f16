"""The finished training groups: ready ones, leased batches, and the choice of the next batch.

Pure: no clock, socket or randomness.
Invariants
- Batches are taken in the order of their train_version. The same train_version always returns the
  same groups until it is committed, also after a restart of the learner or the buffer (a batch that
  was leased once stays planned for that version).
- A batch has groups_per_step groups, oldest admission first, each with at least one token within
  the staleness bound.
- With uses_per_group above 1 a step also trains the groups of the batches before its own that are
  still within the bound. They follow from the batches, so they are not leased again.
- A younger group may overtake an unfinished older one only if the older one, trained in its turn
  afterwards, is still within the bound. So no group becomes over-age because it was skipped; with
  max_staleness=0 no group is skipped.

Why waiting cannot deadlock.  A batch waits only for open groups. A generating group is closed by
its put, its failure, the loss of its generator (lease timeout) or its own time limit. An issued
group is handed out before new ones; as the oldest it has only leased batches ahead of it, so the
gate admits it at the latest when these are committed and a generator has weights within
max_staleness versions of the learner's. When groups are dropped instead, fewer than (max_staleness
+ 1) x groups_per_step are active and new ones are admitted.
"""

import bisect
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import replace

from async_rl.buffer.changes import Trained
from async_rl.buffer.groups import OpenGroup, StoredGroup, Take, batches_of
from async_rl.buffer.leases import Pace
from async_rl.config.run import RunConfig
from async_rl.core.errors import ProtocolError, StalenessError
from async_rl.core.types import NO_VERSION, GroupState


def _order(group: StoredGroup) -> tuple[bool, int, int]:
    # Planned groups come first, in their former batches: a step that is repeated after a crash then
    # trains the same groups, and its weights are the same as before.
    return group.planned == NO_VERSION, group.planned, group.group_id


def _ids(groups: Iterable[StoredGroup]) -> tuple[int, ...]:
    return tuple(group.group_id for group in groups)


def remove_sorted(numbers: list[int], number: int) -> None:
    """Remove a number from a sorted list. `list.remove` would compare it with all before it."""
    del numbers[bisect.bisect_left(numbers, number)]


class Replay:
    """Ready and leased groups, and the learner's committed version."""

    def __init__(
        self,
        config: RunConfig,
        *,
        learner_version: int = 0,
        ready: Iterable[StoredGroup] = (),
        leased: Iterable[StoredGroup] = (),
        trained: Iterable[StoredGroup] = (),
    ) -> None:
        """trained: by the newest buffer.uses_per_group - 1 steps, planned for the versions that
        they were trained on.
        """
        buffer = config.buffer
        self.pace = Pace(config)
        self.learner_version = learner_version
        self.ready: dict[int, StoredGroup] = {}
        # Ids of the ready groups without a plan, in order: each ticket that is handed out again is
        # compared with them.
        self._unplanned: list[int] = []
        self.leases = batches_of(leased)
        self._uses = buffer.uses_per_group
        # The batches that the next steps use again.
        self._trained = batches_of(trained)
        self.groups_per_step = buffer.groups_per_step
        self.max_staleness = buffer.max_staleness_versions
        self._masks_over_age = buffer.age_rule == "mask"
        self._exact_until = config.num_steps if buffer.age_rule == "exact" else 0
        # Groups that were put since all ready ones were compared with the bound of this version: a
        # waiting learner repeats its request after every put, and thousands of groups may be ready.
        self._compared_version = NO_VERSION
        self._new: set[int] = set()
        for group in ready:
            self.put(group)

    @property
    def num_leased(self) -> int:
        """Groups that the learner has."""
        return sum(map(len, self.leases.values()))

    @property
    def num_stored(self) -> int:
        """Leased and ready groups."""
        return self.num_leased + len(self.ready)

    def check_leased(self, train_version: int, group_ids: Iterable[int]) -> None:
        """Raise ProtocolError unless all groups are of the leased batch of this version."""
        unknown = sorted({*group_ids}.difference(self._lease(train_version)))
        if unknown:
            raise ProtocolError(f"groups {unknown} are not leased for version {train_version}")

    def _lease(self, train_version: int) -> list[int]:
        """The groups of the leased batch of this version, with the reused ones."""
        batch = _ids(self.leases.get(train_version, ()))
        return sorted((*batch, *self._reused(train_version)))

    def _reused(self, train_version: int) -> tuple[int, ...]:
        """The groups that are trained with the batch of this version once more."""
        batches = self._trained | self.leases
        earlier = range(train_version - self._uses + 1, train_version)
        groups = [group for version in earlier for group in batches.get(version, ())]
        return _ids(group for group in groups if not self._is_over_age(group, train_version))

    def num_before(self, group_id: int) -> int:
        """Leased and ready groups that are trained before an unplanned group with this id."""
        num_planned = len(self.ready) - len(self._unplanned)
        return self.num_leased + num_planned + bisect.bisect_left(self._unplanned, group_id)

    def put(self, group: StoredGroup) -> None:
        """The group is ready to be taken."""
        self.ready[group.group_id] = group
        self._new.add(group.group_id)
        if group.planned == NO_VERSION:
            bisect.insort(self._unplanned, group.group_id)

    def _unready(self, group_id: int) -> None:
        if self.ready.pop(group_id).planned == NO_VERSION:
            remove_sorted(self._unplanned, group_id)

    def take(self, train_version: int, unfinished: Iterable[OpenGroup], *, now_s: float) -> Take:
        """Lease the batch to be trained on weights of `train_version`.

        unfinished: the open training groups, oldest admission first. Raises ProtocolError if it is
        not that version's turn.
        """
        # The request is repeated if its reply was lost; it must get the same batch.
        if train_version in self.leases:
            return self._taken(train_version)
        if train_version != self.learner_version + len(self.leases):
            raise ProtocolError(
                f"batch {train_version} is not the next one: the learner is at version"
                f" {self.learner_version} with {len(self.leases)} leased batches; send SyncVersion"
                " after a restart"
            )
        # Before counting: groups over age must not complete a batch. They only exist after a crash,
        # since admission bounds the age of all others.
        dropped = self._drop_over_age(train_version)
        wanted = self._num_wanted(train_version)
        if len(self.ready) < wanted:
            reason = f"{len(self.ready)} of {wanted} groups are ready for step {train_version + 1}"
            return Take(dropped=dropped, waits_for=reason)
        # Not a sort of all: with a high bound of the age thousands of groups are ready.
        oldest = heapq.nsmallest(self.groups_per_step, self.ready.values(), key=_order)
        # Sorted, so that the batch does not depend on which of its groups finished first.
        chosen = sorted(oldest, key=lambda group: group.group_id)
        blocking = self._blocking(train_version, chosen, unfinished)
        if blocking is not None:
            reason = (
                f"group {blocking.group_id}, which is still generated and would be over age after"
                f" step {train_version + 1}"
            )
            return Take(dropped=dropped, waits_for=reason)
        self.pace.lease(train_version, chosen, now_s)
        for group in chosen:
            self._unready(group.group_id)
        self.leases[train_version] = tuple(replace(g, planned=train_version) for g in chosen)
        return self._taken(train_version, dropped)

    def _taken(self, train_version: int, dropped: tuple[int, ...] = ()) -> Take:
        group_ids = _ids(self.leases[train_version])
        return Take(group_ids=group_ids, reused=self._reused(train_version), dropped=dropped)

    def commit(self, version: int, group_ids: Sequence[int], *, now_s: float) -> Trained | None:
        """Commit step `version` and return the groups that it trained, None if it was known.

        Raises ProtocolError if these groups are not the step's lease, StalenessError if one of them
        is over age.
        """
        # The request was repeated after a lost reply.
        if version <= self.learner_version:
            return None
        batch = self.leases.get(version - 1)
        if version != self.learner_version + 1 or batch is None:
            raise ProtocolError(
                f"step {version} cannot be committed: the buffer is at {self.learner_version} and"
                f" has leased the batches {sorted(self.leases)}"
            )
        expected = self._lease(version - 1)
        if sorted(group_ids) != expected:
            raise ProtocolError(
                f"step {version} reports groups {sorted(group_ids)}, its lease is {expected}"
            )
        # Checked again, although `take` did: this is the last place before the step is on record.
        over_age = [g.group_id for g in batch if self._is_over_age(g, version - 1)]
        if over_age:
            raise StalenessError(
                f"step {version} trained groups {over_age}, which are older than"
                f" {self.max_staleness} versions"
            )
        trained = self._end(version - 1)
        self.pace.commit(version, now_s, has_next=bool(self.leases))
        return trained

    def _end(self, train_version: int) -> Trained:
        """The batch of this version is trained."""
        reused = self._reused(train_version)
        batch = self.leases.pop(train_version)
        self._trained[train_version] = batch
        self._trained.pop(train_version - self._uses + 1, None)
        self.learner_version = train_version + 1
        return Trained(version=self.learner_version, group_ids=_ids(batch), reused=reused)

    @property
    def last_start(self) -> int:
        """The last version that the learner may start from: every step before it has a batch."""
        version = self.learner_version
        while version in self.leases:
            version += 1
        return version

    def drop(
        self, train_version: int, group_ids: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Remove the batch that is trained now. Return its groups without reused ones, and those of
        later leases, which are ready again; None if the batch was removed before.

        Raises ProtocolError if these groups are not the batch.
        """
        batch = self.leases.get(train_version, ())
        known = {group.group_id for leased in self.leases.values() for group in leased}
        # A repeated request after a lost reply.
        if not known.intersection(group_ids):
            return None
        expected = self._lease(train_version)
        if train_version != self.learner_version or expected != sorted(group_ids):
            raise ProtocolError(
                f"groups {sorted(group_ids)} are not the batch of version {self.learner_version},"
                f" which is {expected}"
            )
        del self.leases[train_version]
        return _ids(batch), self._return_leased()

    def sync(
        self, version: int, stored: Sequence[StoredGroup]
    ) -> tuple[list[Trained], tuple[int, ...]]:
        """Set the learner to `version`. Return the steps that are trained by then, and the groups
        that are ready again.

        stored: the trained groups of later steps and of the uses_per_group - 1 steps before,
        planned for the version they were trained on. Batches leased for earlier versions are
        trained, because the learner's checkpoint contains them. All other leased groups, and the
        stored groups of later steps, are ready again and stay planned. Raises ProtocolError if a
        step before `version` has no batch.
        """
        steps = range(self.learner_version, version)
        missing = [step for step in steps if step not in self.leases]
        if missing:
            raise ProtocolError(
                f"the learner starts at version {version}, but the store has no batch for"
                f" {missing}; use the store and the checkpoint of one run"
            )
        if version < self.learner_version:
            self._trained = batches_of(group for group in stored if group.planned < version)
        trained = [self._end(step) for step in steps]
        self.learner_version = version
        return trained, self._return_leased([g for g in stored if g.planned >= version])

    def _return_leased(self, undone: Sequence[StoredGroup] = ()) -> tuple[int, ...]:
        """Make the leased groups and the undone ones ready. They are planned, so the next takes
        return them first.
        """
        self.pace.stop()
        returned = [group for batch in self.leases.values() for group in batch]
        returned.extend(undone)
        self.leases.clear()
        for group in returned:
            self.put(group)
        return _ids(returned)

    def _drop_over_age(self, train_version: int) -> tuple[int, ...]:
        candidates: Iterable[StoredGroup] = self.ready.values()
        if train_version == self._compared_version:
            candidates = [self.ready[i] for i in sorted(self._new & self.ready.keys())]
        dropped = _ids(g for g in candidates if self._is_over_age(g, train_version))
        for group_id in dropped:
            self._unready(group_id)
        self._compared_version = train_version
        self._new.clear()
        return dropped

    def _is_over_age(self, group: StoredGroup, train_version: int) -> bool:
        # Where over-age tokens are masked, one young token is enough.
        version = group.newest_version if self._masks_over_age else group.oldest_version
        return train_version - version > self.max_staleness

    def _num_wanted(self, train_version: int) -> int:
        """The groups that must be ready before a batch is taken.

        For an exact age these are the groups of the next max_staleness steps too. While they are
        all finished none is generated, so the weights of the next step cannot come into the middle
        of a response; and the first ticket after the step needs these weights.
        """
        ahead = min(self._exact_until - train_version - 1, self.max_staleness)
        return (1 + max(ahead, 0)) * self.groups_per_step

    def _blocking(
        self, train_version: int, chosen: Sequence[StoredGroup], unfinished: Iterable[OpenGroup]
    ) -> OpenGroup | None:
        """The first unfinished group that would be over age if these groups overtook it."""
        # Planned groups overtake nothing: their batch was fixed when it was leased the first time.
        unplanned = [group.group_id for group in chosen if group.planned == NO_VERSION]
        youngest = max(unplanned, default=-1)
        overtaken = [group for group in unfinished if group.group_id < youngest]
        for rank, group in enumerate(overtaken):
            # The best case: the next batch has only overtaken groups, oldest first.
            turn = train_version + 1 + rank // self.groups_per_step
            # The next attempt of an issued group starts on the learner's version or a newer one.
            is_issued = group.state is GroupState.ISSUED
            version = self.learner_version if is_issued else group.version
            if turn - version > self.max_staleness:
                return group
        return None
