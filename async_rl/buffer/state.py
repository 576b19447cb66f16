"""The state of the buffer: the groups from admission to training, and the progress of evaluations.

Every change of state is a command here. A command changes memory and notes the rows that the store
has to record; `drain_changes` returns these changes in the order of the decisions.
Pure: no clock, socket or randomness; `now_s` are monotonic seconds of the caller.
Invariants
- Every request may come twice: a result of another attempt or of a closed group changes nothing, a
  known commit is ignored, a lease is repeated.
- A generator that has left (it is not in the directory any more, or another incarnation replaced
  it) has no group: its groups are handed out again.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from async_rl.buffer import changes
from async_rl.buffer.admission import Admission
from async_rl.buffer.evaluation import EvaluationProgress
from async_rl.buffer.groups import OpenGroup, Recovered, StoredGroup, Take
from async_rl.buffer.leases import MOST_SPARED, Leases, Lives, Outage
from async_rl.buffer.replay import Replay
from async_rl.buffer.tickets import Tickets
from async_rl.config.run import RunConfig
from async_rl.core.heads import PackedGroup
from async_rl.core.types import NO_VERSION, DropReason, GroupState, Purpose, Ticket
from async_rl.data.prompt_file import RunPrompts


class BufferState:
    """The groups of one run: open ones in `admission`, finished ones in `replay`. Others read both;
    only the commands change them. recovered: of the store; its open groups may still be put.
    """

    def __init__(
        self, config: RunConfig, prompts: RunPrompts, recovered: Recovered, *, now_s: float
    ) -> None:
        self.outage = Outage()
        self.replay = Replay(
            config,
            learner_version=recovered.learner_version,
            ready=recovered.ready,
            leased=recovered.leased,
            trained=recovered.trained,
        )
        self.admission = Admission(
            config,
            self.replay,
            # Another process's clock means nothing here: the limits of tickets start again.
            groups=[replace(group, issued_s=now_s) for group in recovered.open],
            next_group_id=recovered.next_group_id,
            next_index=recovered.next_index,
        )
        # Since the start of this process; the store counts the groups of all processes.
        self.drops: Counter[str] = Counter()
        self.num_refused = 0
        self.tickets = Tickets(config, prompts, recovered)
        self._num_held_out = prompts.num_held_out
        self.leases = Leases(config)
        self.evaluations = EvaluationProgress(recovered)
        self.lives = Lives(recovered.lives)
        self._num_set_aside = Counter(recovered.set_aside)
        self._replaces_uniform = config.buffer.uniform_groups == "replace"
        self._newest_version = recovered.newest_version
        self._changes: list[changes.Change] = []

    def drain_changes(self) -> list[changes.Change]:
        """Return the changes since the last call, oldest first."""
        drained = self._changes
        self._changes = []
        return drained

    # ---- questions, which change nothing

    def num_free(self, purpose: Purpose, now_s: float) -> int:
        """Return how many tickets of this purpose could be handed out now, at most."""
        return self.outage.num_allowed(
            self.admission.num_free(purpose, now_s),
            is_generating=bool(self.admission.generators),
            now_s=now_s,
        )

    def refusal(self, version: int, purposes: Collection[Purpose], now_s: float) -> str:
        """Return why a generator at this version gets no ticket, or an empty string."""
        # An outage first: it is the reason on which a person can act.
        return self.outage.refusal or self.admission.refusal(version, purposes, now_s)

    def queue(self) -> dict[str, int]:
        """Return the current number of training groups in each state."""
        num_generating = self.admission.num_generating
        return {
            "issued": self.admission.num_training - num_generating,
            "generating": num_generating,
            "ready": len(self.replay.ready),
            "leased": self.replay.num_leased,
        }

    # ---- commands of generators

    def hand_out(
        self, purpose: Purpose, *, generator: str, incarnation: str, version: int, now_s: float
    ) -> Ticket | None:
        """Return a ticket for the next group of this purpose; None if the generator is refused."""
        group = self.admission.hand_out(
            purpose, generator=generator, incarnation=incarnation, version=version, now_s=now_s
        )
        if group is None:
            return None
        # Only the first attempt admits a group. A later one changes the row that exists.
        if purpose is Purpose.TRAIN and group.attempt == 1:
            if self.tickets.rule is not None:
                self._changes += self.tickets.rule.before(group.index)
            self._changes.append(self.tickets.admitted(group))
        else:
            self._changes.append(changes.HandedOut(group=group))
        return self.tickets.ticket(group)

    def hand_out_again(
        self, generator: str, known: Collection[int], *, version: int, most: int
    ) -> list[Ticket]:
        """Return the generator's tickets that were lost with a reply: the same attempts.

        known: the groups whose tickets the generator has.  most: tickets to return.
        """
        groups = self.admission.of_generator(generator)
        lost = [group.group_id for group in groups if group.group_id not in known][:most]
        # The learner may have gone back since the first hand-out, and the weights with it.
        self.admission.lower_version(lost, version)
        return [self.tickets.ticket(self.admission.open[group_id]) for group_id in lost]

    def complete(self, group: PackedGroup, payload: memoryview, now_s: float) -> None:
        """All samples of the group arrived. payload: the group, encoded. Raises ProtocolError if it
        is not a valid group of this run; `refuse` it then.
        """
        known = self.admission.open.get(group.group_id)
        # A repeated message, a group that a power loss made unknown, or the result of an attempt
        # that was given up. Its tokens may be valid, but the next attempt has started, and only one
        # of the two may be trained.
        if known is None or known.attempt != group.attempt:
            return
        # Before any change: a group that is refused must leave the state as it was.
        self.tickets.check(group, known, newest_version=self._newest_version)
        change = changes.completed(group, payload)
        facts = change.facts
        self.outage.end()
        self.admission.close(group.group_id)
        self._changes.append(change)
        if known.purpose is Purpose.EVAL:
            self.evaluations.end_group(known.evaluation)
            return
        if self.tickets.rule is not None:
            self.tickets.rule.note(known.index, facts.rewards)
        # Such a group would count towards its batch and contribute no gradient.
        if facts.oldest_version == NO_VERSION:
            self._drop(group.group_id, DropReason.UNTRAINABLE, "no token is trained")
            return
        if self._replaces_uniform and group.head.is_uniform:
            self._drop(group.group_id, DropReason.NO_SIGNAL, "all samples have the same reward")
            return
        stored = StoredGroup(
            group_id=group.group_id,
            oldest_version=facts.oldest_version,
            newest_version=facts.newest_version,
            issued_s=known.issued_s,
            ready_s=now_s,
        )
        self.replay.put(stored)

    def refuse(self, group: PackedGroup, message: str) -> None:
        """Count a group that `complete` refused, and end its attempt."""
        self.num_refused += 1
        self.fail(group.group_id, group.attempt, DropReason.INVALID, message)

    def fail(self, group_id: int, attempt: int, reason: DropReason, message: str) -> None:
        """End the attempt; the group is dropped after generation.max_attempts of them, not counting
        the first ones of an outage, and not counting attempts without a program that took a
        session.
        """
        group = self.admission.open.get(group_id)
        if group is None or group.attempt != attempt or group.state is not GroupState.GENERATING:
            return
        is_outage = reason is DropReason.SCORING_OUTAGE
        is_spared = is_outage and group.num_spared < MOST_SPARED
        is_spared = is_spared or reason is DropReason.NOT_TAKEN
        self._return_tickets([group], reason, message, is_spared=is_spared)

    def lose(self, generator: str, message: str, *, is_spared: bool = False) -> None:
        """The generator left. is_spared: on request, so that its attempts do not count."""
        groups = self.admission.of_generator(generator)
        message = f"{generator}: {message}"
        self._return_tickets(groups, DropReason.GENERATOR_LOST, message, is_spared=is_spared)

    def replace(self, generator: str, incarnation: str) -> None:
        """The generator runs as this incarnation, so groups of others are handed out again. Raises
        Superseded for one that another has replaced.
        """
        self.leases.admit(generator, incarnation)
        groups = self.admission.of_generator(generator)
        replaced = [group for group in groups if group.incarnation != incarnation]
        self._return_tickets(replaced, DropReason.GENERATOR_LOST, "replaced")

    def expire(self, listed: Collection[str], now_s: float) -> set[str]:
        """Return tickets that are out for too long, and the generators that had them. listed:
        generators in the directory.
        """
        groups = self.admission.open.values()
        late = [group for group in groups if self.leases.end_s(group, listed) <= now_s]
        message = (
            "its generator has left, or neither delivered it nor reported a failure within"
            f" {self.leases.ticket_s:g} s"
        )
        self._return_tickets(late, DropReason.GENERATOR_LOST, message)
        return {group.generator for group in late}

    # ---- commands of the learner

    def take(self, train_version: int, now_s: float) -> Take:
        """Lease the batch of this version. Raises ProtocolError if it is not its turn."""
        is_repeated = train_version in self.replay.leases
        taken = self.replay.take(train_version, self.admission.training(), now_s=now_s)
        for group_id in taken.dropped:
            message = f"too old for the batch of version {train_version}"
            self._drop(group_id, DropReason.OVER_AGE, message)
        if taken.group_ids and not is_repeated:
            lease = changes.Leased(train_version=train_version, group_ids=taken.group_ids)
            self._changes.append(lease)
        return taken

    def commit(self, version: int, group_ids: Sequence[int], now_s: float) -> None:
        """Step `version` trained these groups. Raises as `Replay.commit`."""
        trained = self.replay.commit(version, group_ids, now_s=now_s)
        if trained is not None:
            self._trained(trained)

    def drop_batch(self, train_version: int, group_ids: Sequence[int], message: str) -> int:
        """Drop the batch of this version. Return the number of batches dropped for it so far."""
        ended = self.replay.drop(train_version, group_ids)
        if ended is not None:
            batch, returned = ended
            dropped = changes.BatchDropped(
                version=train_version, group_ids=batch, message=message, returned=returned
            )
            self._changes.append(dropped)
            self.drops[DropReason.UNTRAINABLE] += len(batch)
            self._num_set_aside[train_version] += len(batch)
        return self._num_set_aside[train_version] // self.replay.groups_per_step

    def begin_life(self, incarnation: str, version: int) -> None:
        """A life of the learner starts at `version`. Raises Superseded for an earlier
        life."""
        self._changes += self.lives.begin(incarnation, version)

    def sync(self, version: int, stored: Sequence[StoredGroup]) -> None:
        """Set the learner to `version`, as `Replay.sync`."""
        goes_back = version < self.replay.learner_version
        trained, returned = self.replay.sync(version, stored)
        for step in trained:
            self._trained(step)
        if goes_back or returned:
            self._changes.append(changes.Undone(version=version, group_ids=returned))
        if goes_back:
            # Later versions will be other weights, so their evaluations start again.
            self.evaluations.forget_after(version)
            for group_id in self.admission.close_evaluations(after=version):
                message = f"the learner started at version {version}"
                self._drop(group_id, DropReason.OVER_AGE, message, purpose=Purpose.EVAL)
        # A generator may have sampled the first tokens with weights that are now discarded; they
        # count as the version the learner returned to, so the bound of their age stays true.
        self.admission.lower_version(list(self.admission.open), version)

    def start_evaluation(self, version: int) -> None:
        """Open one group per held-out prompt, unless the evaluation was started before."""
        num_prompts = self._num_held_out
        if num_prompts == 0 or not self.evaluations.start(version, num_prompts):
            return
        self._changes.append(changes.EvaluationStarted(version=version, num_prompts=num_prompts))
        for group in self.admission.start_evaluation(version, num_prompts):
            self._changes.append(self.tickets.admitted(group))

    # ---- inside

    def _return_tickets(
        self,
        groups: Iterable[OpenGroup],
        reason: DropReason,
        message: str,
        *,
        is_spared: bool = False,
    ) -> None:
        for group in groups:
            group_id = group.group_id
            if self.admission.return_ticket(group_id, is_spared=is_spared):
                returned = changes.Returned(group_id=group_id, reason=reason, message=message)
                self._changes.append(returned)
                continue
            self._drop(group_id, reason, message, purpose=group.purpose)
            # A dropped prompt must not hold up the report of its evaluation.
            if group.purpose is Purpose.EVAL:
                self.evaluations.end_group(group.evaluation)

    def _drop(
        self, group_id: int, reason: DropReason, message: str, *, purpose: Purpose = Purpose.TRAIN
    ) -> None:
        self._changes.append(changes.Dropped(group_id=group_id, reason=reason, message=message))
        if purpose is Purpose.TRAIN:
            self.drops[reason] += 1

    def _trained(self, step: changes.Trained) -> None:
        self._changes.append(step)
        self._newest_version = max(self._newest_version, step.version)
