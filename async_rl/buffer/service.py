"""The buffer's answers: what is stored, which batch is trained, what is evaluated. No sockets here.

Invariants
- Memory changes first, in one stretch without an await, and queues the same change for the store;
  the reply leaves after `store.flush()`,
  and never if the store fails: that ends this process (buffer.py watches `Store.failed`), and the
  next one is asked again. So the store always holds a prefix of what memory decided, and nobody
  acts on a decision that a crash could take back.
- Every request may come twice: lost tickets are given again, a known put or commit is just
  confirmed, a lease is repeated.
- Parked requests wait for events that the change sets; nothing polls.
Called by processes/buffer.py, which owns the sockets, the clock and the tasks.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from async_rl.buffer.admission import OpenGroup
from async_rl.buffer.replay import Replay, StoredGroup, Unfinished
from async_rl.buffer.store.store import Store
from async_rl.buffer.tickets import PromptSource, TicketDesk
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError, InfrastructureError, ProtocolError
from async_rl.core.summary import summarize
from async_rl.core.types import NO_VERSION, DropReason, Group, GroupState, Purpose
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.buffer import (
    FailGroup,
    LimitStaleness,
    PutGroup,
    ReleaseGenerator,
    RequestWork,
)
from async_rl.protocol.learner import (
    Batch,
    CommitStep,
    EvaluationScores,
    ForgetBefore,
    GetEvaluationScores,
    KeepAdvantages,
    StartEvaluation,
    SyncVersion,
    TakeBatch,
)


class BufferService:
    """Ticket desk, replay and store of one run, as asynchronous request handlers. clock: monotonic
    seconds.
    """

    def __init__(
        self, config: RunConfig, prompts: PromptSource, store: Store, *, clock: Callable[[], float]
    ) -> None:
        buffer = config.buffer
        self._keep_steps = buffer.keep_steps
        self._max_staleness = buffer.max_staleness_versions
        self.replay = Replay(
            groups_per_step=buffer.groups_per_step,
            max_staleness_versions=buffer.max_staleness_versions,
            over_age=buffer.over_age,
        )
        self.desk = TicketDesk(
            config,
            prompts,
            store,
            self.replay,
            clock=clock,
            dropped=self._on_dropped,
            changed=self._wake,
        )
        self.drops: Counter[str] = Counter()
        self.num_trained = 0
        self.finished_evaluations: asyncio.Queue[int] = asyncio.Queue()
        self._prompts = prompts
        self._store = store
        self._cache: dict[int, Group] = {}
        self._evaluations: dict[int, int] = {}
        self._changed = asyncio.Event()
        self._take_reason = ""
        self._learner_epoch = 0

    def recover(self) -> None:
        """Takes over what the store holds: ready stays ready, leased stays leased, open groups stay
        with their generators until lost.
        """
        found = self._store.recover()
        self.desk.recover(found)
        self.replay.restore(
            learner_version=found.learner_version, ready=found.ready, leased=found.leased
        )
        self.num_trained = sum(
            count for (state, _), count in found.counts.items() if state == GroupState.TRAINED
        )
        self.drops.update(
            {
                reason: count
                for (state, reason), count in found.counts.items()
                if state == GroupState.DROPPED
            }
        )
        for version, is_finished in found.evaluations.items():
            self._evaluations[version] = (
                0 if is_finished else sum(g.evaluation == version for g in found.open)
            )
            if not is_finished and self._evaluations[version] == 0:
                self.finished_evaluations.put_nowait(version)

    # ---- generators

    async def request_work(self, request: RequestWork) -> Message:
        """Tickets, at once or when admission frees some."""
        work = await self.desk.request_work(request)
        await self._stored()
        return work

    async def put_group(self, request: PutGroup) -> Message:
        """Stores a complete group; a result of another attempt or one already known changes
        nothing.
        """
        group = request.group
        self.desk.heard(group.generator)
        known = self.desk.admission.open.get(group.group_id)
        if known is not None and known.attempt == group.attempt:
            self._accept(group, known)
        elif group.group_id >= self.desk.admission.next_group_id:
            raise ProtocolError(
                f"group {group.group_id} was never issued; is its generator of another run?"
            )
        return await self._confirm()

    async def fail_group(self, request: FailGroup) -> Message:
        """The attempt is over; the group goes out again, or is dropped after
        generation.max_attempts.
        """
        self.desk.heard(request.generator)
        known = self.desk.admission.open.get(request.group_id)
        if (
            known is not None
            and known.attempt == request.attempt
            and known.state is GroupState.GENERATING
        ):
            reason = (
                DropReason(request.reason)
                if request.reason in tuple(DropReason)
                else DropReason.GENERATION_FAILED
            )
            self.desk.give_back([known], reason, request.message)
        return await self._confirm()

    async def release_generator(self, request: ReleaseGenerator) -> Message:
        """The generator is gone: its unfinished groups go out again."""
        self.desk.lose(request.generator, request.incarnation, "its process ended")
        return await self._confirm()

    async def limit_staleness(self, request: LimitStaleness) -> Message:
        """Admission runs less far ahead from now on; what is admitted already is trained as it
        would have been.
        """
        configured = self._max_staleness
        if not 0 <= request.max_staleness_versions <= configured:
            raise ConfigError(
                f"max_staleness_versions={request.max_staleness_versions} is not within"
                f" 0..{configured}, the run's own bound"
            )
        self.desk.admission.gate = replace(
            self.desk.admission.gate, max_staleness_versions=request.max_staleness_versions
        )
        self.desk.serve()
        return Ok()

    def expire(self, alive: Iterable[str]) -> float:
        """Gives back what generators lost; seconds until the next deadline."""
        return self.desk.expire(alive)

    # ---- the learner

    async def take_batch(self, request: TakeBatch) -> Message:
        """Leases the batch of this version; parked until its groups are there."""
        epoch = self._learner_epoch
        group_ids: tuple[int, ...] = ()
        try:
            async with asyncio.timeout(request.wait_s):
                while epoch == self._learner_epoch and not (
                    group_ids := self._take(request.train_version)
                ):
                    await self._changed.wait()
        except TimeoutError:
            pass
        waits_for, self._take_reason = self._take_reason, ""
        await self._stored()
        return Batch(groups=await self._load(group_ids), waits_for="" if group_ids else waits_for)

    async def commit_step(self, request: CommitStep) -> Message:
        """The step is done: its groups are trained, and admission may go on."""
        trained = self.replay.commit(request.version, request.group_ids)
        if trained:
            self._trained(request.version, [g.group_id for g in trained])
        return await self._confirm()

    async def keep_advantages(self, request: KeepAdvantages) -> Message:
        """Beside the trajectories, for `async-rl rollouts`."""
        self._store.keep_advantages(zip(request.group_ids, request.rows, strict=True))
        return Ok()

    async def sync_version(self, request: SyncVersion) -> Message:
        """The learner starts at this version: batches its checkpoint does not hold are ready again,
        trained steps beyond it are undone.
        """
        await self._stored()
        if request.version < self._store.forgotten_before:
            raise ProtocolError(
                f"the learner starts at version {request.version}, but the trajectories of steps up"
                f" to {self._store.forgotten_before} are deleted, because a newer checkpoint held"
                " them; bring that checkpoint back"
            )
        self._learner_epoch += 1
        before = self.replay.learner_version
        undone = (
            await self._store.trained_after(request.version) if request.version < before else []
        )
        outcome = self.replay.sync(request.version, undone)
        for step, group_ids in outcome.trained:
            self._trained(step, group_ids)
        if request.version < before or outcome.returned:
            self._store.undo(
                request.version,
                outcome.returned,
                reason=f"learner started at version {request.version}",
            )
        self.num_trained -= len(undone)
        self._evaluations = {
            v: n for v, n in self._evaluations.items() if v <= request.version or n > 0
        }
        self.desk.admission.fall_back(request.version)
        return await self._confirm()

    async def start_evaluation(self, request: StartEvaluation) -> Message:
        """Opens one group per held-out prompt; finished_evaluations gets the version when all are
        done.
        """
        if request.version not in self._evaluations and self._prompts.num_held_out > 0:
            self._evaluations[request.version] = self.desk.start_evaluation(request.version)
        elif (
            self._evaluations.get(request.version) == 0
        ):  # a learner that came back to this version asks again: its numbers may be lost
            self.finished_evaluations.put_nowait(request.version)
        return await self._confirm()

    async def evaluation_scores(self, _: GetEvaluationScores) -> Message:
        """How good the versions were that have been evaluated."""
        return EvaluationScores(pass_rates=await self._store.evaluation_scores())

    async def forget_before(self, request: ForgetBefore) -> Message:
        """Trajectories that no checkpoint can need any more are deleted, but for the newest; what
        the ledger says of them stays.
        """
        trained = self.replay.learner_version
        version = min(request.version, trained - self._keep_steps)
        if request.version <= trained and self._store.forgotten_before < version:
            self._store.forget_before(version)
        return await self._confirm()

    # ---- what people see

    def queue(self) -> dict[str, int]:
        """Training groups per state of the moment."""
        admission = self.desk.admission
        return {
            "issued": admission.num_training - admission.num_generating,
            "generating": admission.num_generating,
            "ready": len(self.replay.ready),
            "leased": self.replay.num_leased,
        }

    def waits_for(self) -> str:
        """What the learner waits for here, else why generators are refused; then the evaluation
        that nobody takes; empty if all is well.
        """
        refusal, text = self.desk.refusal(), ""
        if self._take_reason:
            why = refusal or (
                "" if self.desk.admission.num_generating else "no generator asks for work"
            )
            text = f"groups: {self._take_reason}" + (f"; {why}" if why else "")
        elif refusal:
            text = f"admission: {refusal}"
        return "; ".join(filter(None, (text, self.desk.unserved_evaluation())))

    async def changed(self) -> None:
        """Returns after the next change of any state."""
        await self._changed.wait()

    # ---- inside

    async def _confirm(self) -> Message:
        """Lets everyone go on who may now, and answers once the change is stored."""
        self.desk.serve()
        await self._stored()
        return Ok()

    async def _stored(self) -> None:
        """Returns once all that was decided is stored; without an end if it cannot be."""
        try:
            await self._store.flush()
        except InfrastructureError:
            await asyncio.get_running_loop().create_future()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _accept(self, group: Group, known: OpenGroup) -> None:
        num_samples = self.desk.num_samples(known.purpose)
        if len(group.trajectories) != num_samples:
            raise ProtocolError(
                f"group {group.group_id} has {len(group.trajectories)} samples, its ticket says"
                f" {num_samples}"
            )
        summary = summarize(group)
        self.desk.close(known)
        self._store.put(group, summary)
        if known.purpose is Purpose.TRAIN:
            self.desk.score_filter.note(
                known.index, [sample.score.reward for sample in group.trajectories]
            )
        if known.purpose is Purpose.EVAL:
            self._count_evaluated(known)
        elif summary.oldest_version == NO_VERSION:
            self._drop(group.group_id, DropReason.UNTRAINABLE, "no token is trained")
        else:
            self.replay.put(
                StoredGroup(
                    group_id=group.group_id,
                    oldest_version=summary.oldest_version,
                    newest_version=summary.newest_version,
                )
            )
            self._cache[group.group_id] = group

    def _on_dropped(self, group: OpenGroup, reason: DropReason, message: str) -> None:
        self._store.drop(group.group_id, reason=reason, message=message)
        if group.purpose is Purpose.EVAL:
            self._count_evaluated(group)
        else:
            self.drops[reason] += 1

    def _drop(self, group_id: int, reason: DropReason, message: str) -> None:
        self._cache.pop(group_id, None)
        self._store.drop(group_id, reason=reason, message=message)
        self.drops[reason] += 1

    def _count_evaluated(self, group: OpenGroup) -> None:
        self._evaluations[group.evaluation] -= 1
        if self._evaluations[group.evaluation] == 0:
            self.finished_evaluations.put_nowait(group.evaluation)

    def _trained(self, version: int, group_ids: Iterable[int]) -> None:
        group_ids = list(group_ids)
        self._store.commit(version, group_ids)
        self.num_trained += len(group_ids)
        for group_id in group_ids:
            self._cache.pop(group_id, None)

    def _take(self, train_version: int) -> tuple[int, ...]:
        is_new = train_version not in self.replay.leases
        current = self.replay.learner_version
        unfinished = (
            Unfinished(
                group_id=g.group_id, version=current if g.state is GroupState.ISSUED else g.version
            )
            for g in self.desk.admission.training()
        )
        take = self.replay.take(train_version, unfinished)
        for group_id in take.dropped:
            self._drop(
                group_id, DropReason.OVER_AGE, f"too old for the batch of version {train_version}"
            )
        if is_new and take.group_ids:
            self._store.lease(train_version, take.group_ids)
        self._take_reason = take.waits_for
        if is_new and (take.dropped or take.group_ids):
            self.desk.serve()
        return take.group_ids

    async def _load(self, group_ids: Iterable[int]) -> list[Group]:
        """The groups; those that an earlier life of this process received come from the store."""
        missing = [i for i in group_ids if i not in self._cache]
        if missing:
            self._cache.update(zip(missing, await self._store.read_groups(missing), strict=True))
        return [self._cache[i] for i in group_ids]
