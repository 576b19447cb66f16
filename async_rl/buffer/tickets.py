"""The desk where generators get tickets: parked requests, fair shares, lost replies, lost
generators.

Invariants
- A request is answered with tickets at once, or parked until admission frees some, its wait is
  over, or a newer request replaces it.
- Evaluation goes before training; a generator of a pool for one of them gets nothing of the other.
- A ticket that its generator does not list as held was lost with a reply and is given again, same
  attempt.
- A generator that is gone (told so, replaced by another incarnation, unheard of for too long) holds
  nothing: its groups go out again.
Called by buffer/service.py, which flushes the store before any reply leaves.
"""

from __future__ import annotations

import asyncio
import collections
import heapq
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from async_rl.buffer.admission import Admission, Gate, OpenGroup
from async_rl.buffer.replay import Replay
from async_rl.buffer.store.store import Recovered, Store
from async_rl.config.pools import GENERATORS, generator_pools, pool_of, purposes_of
from async_rl.config.run import RunConfig
from async_rl.config.sampling import num_drawn, sampling_of
from async_rl.core.errors import ProtocolError
from async_rl.core.types import DropReason, GroupState, Prompt, Purpose, Ticket
from async_rl.data.order import PromptOrder
from async_rl.data.score_filter import ScoreFilter
from async_rl.protocol.buffer import RequestWork, Work

_log = logging.getLogger(__name__)


class PromptSource(Protocol):
    """The prompts in the order in which they are issued."""

    @property
    def num_held_out(self) -> int:
        """Prompts of one evaluation."""

    @property
    def order(self) -> PromptOrder:
        """Which training prompt comes when."""

    def prompt(self, purpose: Purpose, index: int) -> Prompt:
        """The index-th prompt of the purpose's order."""


@dataclass(slots=True, kw_only=True)
class _Waiter:
    """A generator's parked request. done is set once it is to be answered."""

    request: RequestWork
    version: int
    group_size: int
    purposes: frozenset[Purpose]
    tickets: list[Ticket] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def credit(self) -> int:
        """Samples it may still get."""
        return self.request.credit * self.group_size - sum(
            ticket.num_samples for ticket in self.tickets
        )


class TicketDesk:
    """Admission with its queue of generators.

    clock: monotonic seconds.  dropped: told of each group that has no attempt left.  changed:
    called after every change of open groups.
    """

    def __init__(
        self,
        config: RunConfig,
        prompts: PromptSource,
        store: Store,
        replay: Replay,
        *,
        clock: Callable[[], float],
        dropped: Callable[[OpenGroup, DropReason, str], None],
        changed: Callable[[], None],
    ) -> None:
        gate = Gate(
            groups_per_step=config.buffer.groups_per_step,
            max_staleness_versions=config.buffer.max_staleness_versions,
            num_steps=config.num_steps,
        )
        self.admission = Admission(
            gate, max_attempts=config.generation.max_attempts, stored_before=replay.stored_before
        )
        self._config = config
        self._prompts = prompts
        self._store = store
        self._replay = replay
        self._clock = clock
        self._dropped = dropped
        self._changed = changed
        self._waiters: dict[str, _Waiter] = {}
        self._heard_s: dict[str, float] = {}
        self._handed_s: dict[int, float] = {}
        self._purposes = {pool: purposes_of(config, pool) for pool in generator_pools(config)}
        self._evaluators = [
            pool for pool, purposes in self._purposes.items() if purposes == {Purpose.EVAL}
        ]
        self.score_filter = ScoreFilter(config, prompts.order)

    def recover(self, found: Recovered) -> None:
        """Open groups stay with the generators that had them; these may still put them. Raises
        ProtocolError if the data changed.
        """
        self.score_filter.restore(
            found.left, self._store.rewards() if self.score_filter.is_on else []
        )
        for group in found.open:
            prompt_id = self._prompts.prompt(group.purpose, group.index).prompt_id
            if prompt_id != found.prompt_ids[group.group_id]:
                raise ProtocolError(
                    f"group {group.group_id} was issued for prompt"
                    f" {found.prompt_ids[group.group_id]}, the data now has {prompt_id} in its"
                    " place; resume with the data and the seed that the run began with"
                )
            if group.state is GroupState.GENERATING:
                self._heard_s[group.generator] = self._handed_s[group.group_id] = self._clock()
        self.admission.restore(
            found.open, next_group_id=found.next_group_id, next_index=found.next_index
        )

    async def request_work(self, request: RequestWork) -> Work:
        """Tickets within the generator's credit; parked while admission refuses. credit=0 only
        tells a new version.
        """
        name = request.generator
        self.heard(name)
        self.give_back(
            [g for g in self.admission.held_by(name) if g.incarnation != request.incarnation],
            DropReason.GENERATOR_LOST,
            "replaced",
        )
        parked = self._waiters.get(name)
        if (
            request.credit == 0
            and parked is not None
            and parked.request.incarnation == request.incarnation
        ):
            parked.version = request.version
            self.serve()
            return Work(tickets=[])
        if parked is not None:
            parked.done.set()
        waiter = self._waiters[name] = _Waiter(
            request=request,
            version=request.version,
            group_size=num_drawn(self._config.generation),
            purposes=self._purposes.get(pool_of(name), self._purposes[GENERATORS]),
        )
        if request.held is not None:
            lost = [g for g in self.admission.held_by(name) if g.group_id not in request.held]
            for group in lost[
                : request.credit
            ]:  # given to weights that the learner may have left behind since
                group.version = min(group.version, request.version)
            waiter.tickets.extend(map(self._ticket, lost[: request.credit]))
        self.serve()
        try:
            if request.credit > 0 and not waiter.tickets:
                async with asyncio.timeout(request.wait_s):
                    await waiter.done.wait()
        except TimeoutError:
            pass
        finally:
            if self._waiters.get(name) is waiter:
                del self._waiters[name]
        refusal = (
            ""
            if waiter.tickets
            else self.admission.refusal(
                waiter.version, self._replay.learner_version, waiter.purposes
            )
        )
        return Work(tickets=waiter.tickets, waits_for=refusal)

    def serve(self) -> None:
        """Hands out what admission allows, each ticket to the parked generator with the least work."""
        for purpose in (Purpose.EVAL, Purpose.TRAIN):
            if self.admission.num_free(purpose) > 0:
                self._serve(purpose)
        self._changed()

    def _serve(self, purpose: Purpose) -> None:
        """A generator that is refused a training ticket for its old weights loads newer ones in a
        moment: its share is kept for it.
        """
        num_kept = collections.Counter[str]()
        able = (
            (i, name, w)
            for i, (name, w) in enumerate(self._waiters.items())
            if purpose in w.purposes
        )
        loads = [(self.admission.num_held(name), i, name) for i, name, w in able if w.credit > 0]
        heapq.heapify(loads)
        while loads and num_kept.total() < self.admission.num_free(purpose):
            load, i, name = loads[0]
            waiter = self._waiters[name]
            is_refused = not self._hand_out(name, waiter, purpose)
            num_kept[name] += is_refused and purpose is Purpose.TRAIN
            if (is_refused and purpose is Purpose.EVAL) or waiter.credit <= num_kept[
                name
            ] * waiter.group_size:
                heapq.heappop(loads)
            else:
                heapq.heapreplace(loads, (load + 1, i, name))

    def start_evaluation(self, version: int) -> int:
        """Opens one group per held-out prompt; their number."""
        num_prompts = self._prompts.num_held_out
        self._store.start_evaluation(version, num_prompts)
        for group in self.admission.start_evaluation(version, num_prompts):
            self._store.admit(
                group,
                self._prompts.prompt(group.purpose, group.index),
                self.num_samples(group.purpose),
            )
        return num_prompts

    def close(self, group: OpenGroup) -> None:
        """The group came back complete."""
        self.admission.close(group.group_id)
        self._handed_s.pop(group.group_id, None)

    def give_back(
        self,
        groups: Iterable[OpenGroup],
        reason: DropReason,
        message: str,
        *,
        is_spared: bool = False,
    ) -> None:
        """These generating groups go out again, or are dropped after generation.max_attempts that
        were not spared.
        """
        for group in groups:
            self._handed_s.pop(group.group_id, None)
            if self.admission.give_back(group.group_id, is_spared=is_spared):
                self._store.give_back(group.group_id, reason=reason, message=message)
            else:
                self._dropped(group, reason, message)

    def heard(self, generator: str) -> None:
        """The generator lives."""
        self._heard_s[generator] = self._clock()

    def lose(
        self, generator: str, incarnation: str, message: str, *, is_spared: bool = False
    ) -> None:
        """The generator (this incarnation, or any if empty) is gone; is_spared: it was asked to go."""
        held = [g for g in self.admission.held_by(generator) if incarnation in ("", g.incarnation)]
        parked = self._waiters.get(generator)
        if parked is not None and incarnation in ("", parked.request.incarnation):
            del self._waiters[generator]
            parked.done.set()
        self.give_back(
            held, DropReason.GENERATOR_LOST, f"{generator}: {message}", is_spared=is_spared
        )
        self.serve()

    def expire(self, alive: Iterable[str]) -> float:
        """Loses generators unheard of for buffer.lease_timeout_s and not `alive`, and groups out
        for far longer than generation.timeout_s.

        Returns the seconds until it has to be called again.
        """
        now = self._clock()
        lease_s = self._config.buffer.lease_timeout_s
        longest_s = self._config.generation.timeout_s + lease_s
        if (
            self._config.placement == "colocated"
        ):  # time limits stand still while a generator rests, which is no longer than this
            longest_s += self._config.supervisor.stall_timeout_s
        self._heard_s.update(dict.fromkeys(alive, now))
        for name in self.holders():
            if now - self._heard_s[name] >= lease_s:
                self.lose(name, "", f"unheard of for {lease_s:g} s (buffer.lease_timeout_s)")
        old = [
            self.admission.open[i]
            for i, since in self._handed_s.items()
            if now - since >= longest_s
        ]
        self.give_back(
            old, DropReason.GENERATOR_LOST, f"neither put nor failed for {longest_s:g} s"
        )
        self.serve()
        leases = [self._heard_s[name] + lease_s for name in self.holders()]
        return (
            min([now + lease_s, *leases, *(since + longest_s for since in self._handed_s.values())])
            - now
        )

    def holders(self) -> set[str]:
        """Generators that work on something."""
        return self.admission.holders()

    def refusal(self) -> str:
        """Why a parked generator gets no training group; empty if none is parked."""
        for waiter in self._waiters.values():
            if Purpose.TRAIN in waiter.purposes and (
                refusal := self.admission.refusal(
                    waiter.version, self._replay.learner_version, waiter.purposes
                )
            ):
                return refusal
        return ""

    def unserved_evaluation(self) -> str:
        """Which evaluation waits because nobody of the pools that are there for it is; empty if
        none does.
        """
        version = self.admission.waiting_evaluation()
        if (
            version is None
            or not self._evaluators
            or any(Purpose.EVAL in waiter.purposes for waiter in self._waiters.values())
        ):
            return ""
        if any(
            group.purpose is Purpose.EVAL and group.state is GroupState.GENERATING
            for group in self.admission.open.values()
        ):
            return ""
        return (
            f"evaluation of version {version}: no generator of {', '.join(self._evaluators)} asks"
            " for work"
        )

    def num_samples(self, purpose: Purpose) -> int:
        """Samples of one group as it is put; of a training prompt more may be drawn."""
        return (
            self._config.generation.group_size
            if purpose is Purpose.TRAIN
            else self._config.evaluation.num_samples
        )

    def _hand_out(self, name: str, waiter: _Waiter, purpose: Purpose) -> bool:
        group = self.admission.hand_out(
            generator=name,
            incarnation=waiter.request.incarnation,
            version=waiter.version,
            learner_version=self._replay.learner_version,
            purposes=(purpose,),
        )
        if group is None:
            return False
        if group.attempt == 1 and group.purpose is Purpose.TRAIN:
            self._filter_at(group.index)
            self._store.admit(
                group,
                self._prompts.prompt(group.purpose, group.index),
                self.num_samples(group.purpose),
            )
        else:
            self._store.hand_out(group)
        self._handed_s[group.group_id] = self._clock()
        waiter.tickets.append(self._ticket(group))
        waiter.done.set()
        return True

    def _filter_at(self, position: int) -> None:
        """If an epoch begins here, prompts may leave first."""
        leavers = self.score_filter.leavers_at(position)
        if not leavers:
            return
        names = [
            self._prompts.prompt(Purpose.TRAIN, leaver.position).prompt_id for leaver in leavers
        ]
        self._store.leave(
            position,
            [(who.index, name, who.score) for who, name in zip(leavers, names, strict=True)],
        )
        _log.info(
            "%d prompts left the training data by their mean reward (data.filter), the first %s"
            " with %.3g; %d remain",
            len(leavers),
            names[0],
            leavers[0].score,
            len(self._prompts.order.active),
        )

    def _ticket(self, group: OpenGroup) -> Ticket:
        generation, is_training = self._config.generation, group.purpose is Purpose.TRAIN
        return Ticket(
            group_id=group.group_id,
            attempt=group.attempt,
            purpose=group.purpose,
            prompt=self._prompts.prompt(group.purpose, group.index),
            num_samples=(
                num_drawn(generation) if is_training else self._config.evaluation.num_samples
            ),
            sampling=sampling_of(self._config, group.purpose),
            admitted_version=group.version,
        )
