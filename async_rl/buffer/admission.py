"""The open groups (admitted, not finished), and the rule that admits more.

Pure: no clock, socket or randomness.
Invariants
- At most (max_staleness + 1) x groups_per_step training groups are active (issued, generating,
  ready or leased).
- A training ticket is handed out only if the group, trained in its turn, is within the staleness
  bound: groups are trained in the order of admission, groups_per_step at a time, so a group with
  `ahead` active groups before it meets the weights of version learner_version + ahead //
  groups_per_step, and its tokens are at least as new as the generator's version.
- A returned group is handed out before new ones, the oldest first, with the next attempt number.
- A generating group has exactly one generator, an issued one has none.
"""

import bisect
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from async_rl.buffer.groups import OpenGroup
from async_rl.buffer.replay import Replay, remove_sorted
from async_rl.config.run import RunConfig
from async_rl.core.types import NO_VERSION, GroupState, Purpose


class Admission:
    """The open groups, in order of admission. The replay knows the groups that follow them."""

    def __init__(
        self,
        config: RunConfig,
        replay: Replay,
        *,
        groups: Iterable[OpenGroup] = (),
        next_group_id: int = 0,
        next_index: int = 0,
    ) -> None:
        self.open: dict[int, OpenGroup] = {}
        self.next_index = next_index
        self.next_group_id = next_group_id
        self._replay = replay
        self._num_steps = config.num_steps
        self._max_attempts = config.generation.max_attempts
        self._waiting: dict[Purpose, list[int]] = {Purpose.EVAL: [], Purpose.TRAIN: []}
        # Without these indexes, each ticket would be compared with all open groups.
        self._training: list[int] = []
        self._by_generator: dict[str, set[int]] = {}
        for group in groups:
            self._open(group)

    @property
    def num_training(self) -> int:
        """Training groups that are issued or generating."""
        return len(self._training)

    @property
    def num_active(self) -> int:
        """Training groups that are issued, generating, ready or leased."""
        return self.num_training + self._replay.num_stored

    @property
    def num_generating(self) -> int:
        """Training groups that a generator works on."""
        return self.num_training - len(self._waiting[Purpose.TRAIN])

    def num_free(self, purpose: Purpose, now_s: float) -> int:
        """Tickets that a generator with the newest weights could get now, at most."""
        num_free = len(self._waiting[purpose])
        if purpose is Purpose.TRAIN:
            num_steps = bisect.bisect(self._replay.pace.opens_s, now_s)
            num_free += max(num_steps * self._replay.groups_per_step - self.num_active, 0)
        return num_free

    def opens_s(self, now_s: float) -> float:
        """Return when groups that are held back now may start, math.inf if none is."""
        opens_s = self._replay.pace.opens_s
        return next((at_s for at_s in opens_s if at_s > now_s), math.inf)

    def waiting_evaluation(self) -> int | None:
        """The version of the first evaluation group that waits for a generator."""
        waiting = self._waiting[Purpose.EVAL]
        return self.open[waiting[0]].evaluation if waiting else None

    @property
    def is_evaluating(self) -> bool:
        """Whether a generator works on an evaluation."""
        return any(
            group.purpose is Purpose.EVAL and group.state is GroupState.GENERATING
            for group in self.open.values()
        )

    def training(self) -> Iterator[OpenGroup]:
        """Open training groups, oldest admission first."""
        return (self.open[group_id] for group_id in self._training)

    def of_generator(self, generator: str) -> list[OpenGroup]:
        """The groups that this generator works on, oldest admission first."""
        return [self.open[group_id] for group_id in sorted(self._by_generator.get(generator, ()))]

    @property
    def generators(self) -> Collection[str]:
        """Generators that work on a group."""
        return self._by_generator.keys()

    def refusal(self, version: int, purposes: Collection[Purpose], now_s: float) -> str:
        """Return why a generator at this version gets no ticket for these purposes, or an empty
        string if it gets one.
        """
        # Evaluations are not limited: they are never trained, so their age does not matter.
        if Purpose.EVAL in purposes and self._first_waiting(Purpose.EVAL, version) is not None:
            return ""
        if Purpose.TRAIN in purposes:
            ahead = self._num_ahead(self._first_waiting(Purpose.TRAIN, version))
            return self.gate(ahead, version, now_s)
        evaluation = self.waiting_evaluation()
        if evaluation is None:
            return "the next evaluation"
        return f"weights of version {evaluation}, which is to be evaluated"

    def gate(self, ahead: int, generator_version: int, now_s: float) -> str:
        """Return why a generator at this version may not start a training group now with `ahead`
        active groups before it, or an empty string if it may.
        """
        learner_version = self._replay.learner_version
        max_staleness = self._replay.max_staleness
        max_active = (max_staleness + 1) * self._replay.groups_per_step
        # Groups are trained in the order of admission, so the number of groups ahead fixes the step
        # that will train this one, before its first token is sampled.
        steps_ahead = ahead // self._replay.groups_per_step
        # Its tokens are this many versions old already when they are sampled.
        lag = max(learner_version - generator_version, 0)
        if learner_version + steps_ahead >= self._num_steps:
            return f"all groups up to the last step ({self._num_steps}) are issued"
        if generator_version == NO_VERSION:
            return "the generator has no weights yet"
        if steps_ahead > max_staleness:
            return (
                f"{ahead} groups are active, the limit is (max_staleness + 1) x groups_per_step ="
                f" {max_active}; the learner has to finish step {learner_version + 1}"
            )
        if steps_ahead + lag > max_staleness:
            needed = learner_version + steps_ahead - max_staleness
            return (
                f"the next group needs weights of version {needed} or later, the generator has"
                f" {generator_version}"
            )
        # After a crash the learner resumes from a checkpoint and assigns the same numbers to other
        # weights. Tokens of the discarded weights would then carry the wrong version.
        if generator_version > learner_version:
            return (
                f"the generator has weights of version {generator_version}, which were discarded"
                f" when the learner returned to {learner_version}"
            )
        if self._replay.pace.opens_s[steps_ahead] > now_s:
            return f"the next group would be ready before step {learner_version + steps_ahead + 1}"
        return ""

    def hand_out(
        self, purpose: Purpose, *, generator: str, incarnation: str, version: int, now_s: float
    ) -> OpenGroup | None:
        """The next group of this purpose, now generating: a waiting one, else a new prompt; None if
        the generator is refused.
        """
        if self.refusal(version, {purpose}, now_s):
            return None
        group_id = self._first_waiting(purpose, version)
        # A group that waits for its next attempt comes before a new one: it was admitted earlier,
        # so it is trained earlier, and a batch may have to wait for it.
        if group_id is None:
            group = OpenGroup(group_id=self.next_group_id, purpose=purpose, index=self.next_index)
            self.next_group_id += 1
            self.next_index += 1
        else:
            group = self.close(group_id)
        # Weights that the learner discarded when it went back do not make the tokens newer.
        return self._open(
            replace(
                group,
                state=GroupState.GENERATING,
                attempt=group.attempt + 1,
                generator=generator,
                incarnation=incarnation,
                version=min(version, self._replay.learner_version),
                issued_s=now_s,
            )
        )

    def start_evaluation(self, version: int, num_prompts: int) -> list[OpenGroup]:
        """Open one group per held-out prompt, for generators of `version` or a later one."""
        groups = []
        for index in range(num_prompts):
            group = OpenGroup(
                group_id=self.next_group_id,
                purpose=Purpose.EVAL,
                index=index,
                evaluation=version,
            )
            groups.append(self._open(group))
            self.next_group_id += 1
        return groups

    def return_ticket(self, group_id: int, *, is_spared: bool = False) -> bool:
        """End a generating group's attempt without a result.

        True: the group waits for its next attempt.  False: that was the last one, and it is closed.
        """
        group = self.close(group_id)
        num_spared = group.num_spared + int(is_spared)
        # Without a limit, a prompt that no attempt can finish would hold up a batch for ever.
        if group.attempt - num_spared >= self._max_attempts:
            return False
        self._open(
            replace(
                group,
                state=GroupState.ISSUED,
                generator="",
                incarnation="",
                num_spared=num_spared,
            )
        )
        return True

    def close_evaluations(self, *, after: int) -> list[int]:
        """Close the groups that evaluate later versions; return their ids."""
        closed = [group.group_id for group in self.open.values() if group.evaluation > after]
        for group_id in closed:
            self.close(group_id)
        return closed

    def lower_version(self, group_ids: Iterable[int], version: int) -> None:
        """The tokens of these groups may be as old as `version` from now on."""
        for group_id in group_ids:
            group = self.open[group_id]
            self.open[group_id] = replace(group, version=min(group.version, version))

    def _open(self, group: OpenGroup) -> OpenGroup:
        self.open[group.group_id] = group
        if group.purpose is Purpose.TRAIN:
            bisect.insort(self._training, group.group_id)
        if group.state is GroupState.ISSUED:
            bisect.insort(self._waiting[group.purpose], group.group_id)
        else:
            self._by_generator.setdefault(group.generator, set()).add(group.group_id)
        return group

    def close(self, group_id: int) -> OpenGroup:
        """Remove a group, which is finished or dropped, and return it."""
        group = self.open.pop(group_id)
        if group.purpose is Purpose.TRAIN:
            remove_sorted(self._training, group_id)
        if group.state is GroupState.ISSUED:
            remove_sorted(self._waiting[group.purpose], group_id)
        else:
            others = self._by_generator[group.generator]
            others.remove(group_id)
            if not others:
                del self._by_generator[group.generator]
        return group

    def _first_waiting(self, purpose: Purpose, version: int) -> int | None:
        # Evaluation groups wait in the order of evaluation starts. That is not the
        # order of their versions if the learner went back. Training groups evaluate no version.
        for group_id in self._waiting[purpose]:
            if self.open[group_id].evaluation <= version:
                return group_id
        return None

    def _num_ahead(self, group_id: int | None) -> int:
        """Active groups that are trained before this one; all of them for None, a new group."""
        if group_id is None:
            return self.num_active
        # A group that was returned is trained in its old turn. If younger groups counted too, they
        # would fill the bound, and the oldest group could never start again.
        return self._replay.num_before(group_id) + bisect.bisect_left(self._training, group_id)
