"""Which ticket may be issued now, to which generator, and why not: the groups that are admitted and
not yet finished.

Pure: no clock, socket or randomness; the buffer's service calls it and stores what it decides.
Invariants
- At most (max_staleness + 1) x groups_per_step training groups are active (issued, generating,
  ready or leased).
- A training ticket is handed out only if the group, trained in its turn, is within the staleness
  bound: groups are trained in the order of admission, groups_per_step at a time, so a group with
  `ahead` active groups before it meets the weights of version learner_version + ahead //
  groups_per_step, and its tokens are at least as new as the generator's version.
- A ticket that came back goes out first, oldest first, with the next attempt number; evaluation
  goes before training.
- An open group has exactly one holder (generating) or none (issued).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from async_rl.core.types import NO_VERSION, GroupState, Purpose

ANY_PURPOSE = frozenset(Purpose)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The bound on how far generation may run ahead of training."""

    groups_per_step: int
    max_staleness_versions: int
    num_steps: int

    @property
    def max_active(self) -> int:
        """Training groups that may be active at one time."""
        return (self.max_staleness_versions + 1) * self.groups_per_step

    def refusal(self, *, ahead: int, learner_version: int, generator_version: int) -> str:
        """Why a generator at this version may not start a group with `ahead` active groups before
        it; empty if it may.
        """
        steps_ahead = ahead // self.groups_per_step
        lag = max(learner_version - generator_version, 0)
        if learner_version + steps_ahead >= self.num_steps:
            return f"every step up to the last ({self.num_steps}) has its groups"
        if generator_version == NO_VERSION:
            return "the generator holds no weights yet"
        if steps_ahead + lag <= self.max_staleness_versions:
            if generator_version <= learner_version:
                return ""
            return (
                f"the generator holds version {generator_version}, which the learner left behind"
                f" when it went back to {learner_version}"
            )
        if steps_ahead > self.max_staleness_versions:
            return (
                f"{ahead} groups are active, (max_staleness + 1) x groups_per_step ="
                f" {self.max_active} may be; the learner has to finish step {learner_version + 1}"
            )
        needed = learner_version + steps_ahead - self.max_staleness_versions
        return (
            f"the next group needs weights of version {needed} or later, the generator has"
            f" {generator_version}"
        )


@dataclass(slots=True, kw_only=True)
class OpenGroup:
    """One admitted, unfinished group.

    index: which prompt of its purpose's order.  attempt: 0 before the first hand-out.  version: no
    token of this attempt is older; for an issued group the version of its last attempt.
    evaluation: the version that an evaluation group is for.  num_spared: attempts that ended
    because a generator left as it was asked to; they do not count.
    """

    group_id: int
    purpose: Purpose
    index: int
    state: GroupState = GroupState.ISSUED
    attempt: int = 0
    generator: str = ""
    incarnation: str = ""
    version: int = NO_VERSION
    evaluation: int = NO_VERSION
    num_spared: int = 0


class Admission:
    """The open groups, and the rule that opens more. `stored_before(group_id)` counts ready and
    leased groups trained before that one.
    """

    def __init__(
        self, gate: Gate, *, max_attempts: int, stored_before: Callable[[int | None], int]
    ) -> None:
        self.gate = gate
        self.open: dict[int, OpenGroup] = {}
        self.next_group_id = 0
        self.next_index = 0
        self._max_attempts = max_attempts
        self._stored_before = stored_before
        self.num_training = 0
        self._waiting: dict[Purpose, list[int]] = {Purpose.EVAL: [], Purpose.TRAIN: []}
        self._held: dict[str, set[int]] = {}

    def restore(self, groups: list[OpenGroup], *, next_group_id: int, next_index: int) -> None:
        """Takes over what the store knows of open groups."""
        self.next_group_id, self.next_index = next_group_id, next_index
        for group in groups:
            self._add(group)

    @property
    def num_active(self) -> int:
        """Training groups issued, generating, ready or leased."""
        return self.num_training + self._stored_before(None)

    @property
    def num_generating(self) -> int:
        """Training groups that a generator works on."""
        return self.num_training - len(self._waiting[Purpose.TRAIN])

    def num_free(self, purpose: Purpose) -> int:
        """Tickets that a generator with the newest weights could get now, roughly: what waits, and
        for training room under the bound.
        """
        room = max(self.gate.max_active - self.num_active, 0) if purpose is Purpose.TRAIN else 0
        return len(self._waiting[purpose]) + room

    def waiting_evaluation(self) -> int | None:
        """The version of the oldest evaluation of which a group waits for a generator."""
        waiting = self._waiting[Purpose.EVAL]
        return self.open[waiting[0]].evaluation if waiting else None

    def training(self) -> Iterator[OpenGroup]:
        """Open training groups, oldest admission first."""
        return (
            self.open[group_id]
            for group_id in sorted(self.open)
            if self.open[group_id].purpose is Purpose.TRAIN
        )

    def held_by(self, generator: str) -> list[OpenGroup]:
        """What this generator works on."""
        return [self.open[group_id] for group_id in sorted(self._held.get(generator, ()))]

    def num_held(self, generator: str) -> int:
        """How many groups it works on."""
        return len(self._held.get(generator, ()))

    def holders(self) -> set[str]:
        """Generators that work on something."""
        return set(self._held)

    def refusal(
        self,
        generator_version: int,
        learner_version: int,
        purposes: Collection[Purpose] = ANY_PURPOSE,
    ) -> str:
        """Why nothing for these purposes can be handed to a generator at this version; empty if
        something can.
        """
        if Purpose.EVAL in purposes and self._evaluation_for(generator_version) is not None:
            return ""
        if Purpose.TRAIN not in purposes:
            version = self.waiting_evaluation()
            return (
                "the next evaluation"
                if version is None
                else f"weights of version {version}, which is to be evaluated"
            )
        waiting = self._waiting[Purpose.TRAIN]
        ahead = self._ahead_of(waiting[0]) if waiting else self.num_active
        return self.gate.refusal(
            ahead=ahead, learner_version=learner_version, generator_version=generator_version
        )

    def hand_out(
        self,
        *,
        generator: str,
        incarnation: str,
        version: int,
        learner_version: int,
        purposes: Collection[Purpose] = ANY_PURPOSE,
    ) -> OpenGroup | None:
        """The next group for this generator, now generating: evaluation, then what came back, then
        a new prompt; None if refused.
        """
        if self.refusal(version, learner_version, purposes):
            return None
        group_id = self._evaluation_for(version) if Purpose.EVAL in purposes else None
        if group_id is not None:
            self._waiting[Purpose.EVAL].remove(group_id)
            group = self.open[group_id]
        elif self._waiting[Purpose.TRAIN]:
            group = self.open[self._waiting[Purpose.TRAIN].pop(0)]
        else:
            group = OpenGroup(
                group_id=self.next_group_id, purpose=Purpose.TRAIN, index=self.next_index
            )
            self.next_group_id += 1
            self.next_index += 1
            self.open[group.group_id] = group
            self.num_training += 1
        group.state = GroupState.GENERATING
        group.attempt += 1
        group.generator, group.incarnation = generator, incarnation
        self._hold(group)
        group.version = min(version, learner_version)
        return group

    def start_evaluation(self, version: int, num_prompts: int) -> list[OpenGroup]:
        """Opens one group per held-out prompt; they wait for a generator that holds `version` or a
        later one.
        """
        groups = [
            OpenGroup(
                group_id=self.next_group_id + i, purpose=Purpose.EVAL, index=i, evaluation=version
            )
            for i in range(num_prompts)
        ]
        self.next_group_id += num_prompts
        for group in groups:
            self._add(group)
        return groups

    def give_back(self, group_id: int, *, is_spared: bool = False) -> bool:
        """A generating group's attempt ended without a result: True if it waits to be issued again,
        False if it is closed for good.
        """
        group = self.open[group_id]
        group.num_spared += is_spared
        self._let_go(group)
        if group.attempt - group.num_spared >= self._max_attempts:
            self.close(group_id)
            return False
        group.state = GroupState.ISSUED
        group.generator = group.incarnation = ""
        bisect.insort(self._waiting[group.purpose], group_id)
        return True

    def close(self, group_id: int) -> OpenGroup:
        """The group is finished or dropped; it is open no more."""
        group = self.open.pop(group_id)
        self._let_go(group)
        if group.state is GroupState.ISSUED:
            self._waiting[group.purpose].remove(group_id)
        if group.purpose is Purpose.TRAIN:
            self.num_training -= 1
        return group

    def fall_back(self, learner_version: int) -> None:
        """The learner went back: what is generated from now on may be as old as `learner_version`."""
        for group in self.open.values():
            group.version = min(group.version, learner_version)

    def _hold(self, group: OpenGroup) -> None:
        self._held.setdefault(group.generator, set()).add(group.group_id)

    def _let_go(self, group: OpenGroup) -> None:
        held = self._held.get(group.generator, set())
        held.discard(group.group_id)
        if not held:
            self._held.pop(group.generator, None)

    def _add(self, group: OpenGroup) -> None:
        self.open[group.group_id] = group
        if group.state is GroupState.GENERATING:
            self._hold(group)
        if group.purpose is Purpose.TRAIN:
            self.num_training += 1
        if group.state is GroupState.ISSUED:
            bisect.insort(self._waiting[group.purpose], group.group_id)

    def _evaluation_for(self, version: int) -> int | None:
        """Groups wait in the order of the evaluations' start, not of their versions (the learner
        may have gone back).
        """
        return next(
            (i for i in self._waiting[Purpose.EVAL] if self.open[i].evaluation <= version), None
        )

    def _ahead_of(self, group_id: int) -> int:
        older = sum(
            1
            for group in self.open.values()
            if group.purpose is Purpose.TRAIN and group.group_id < group_id
        )
        return older + self._stored_before(group_id)
