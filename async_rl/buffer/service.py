"""The buffer's answers to messages. No sockets here.

Each handler changes the state in one stretch without an await, then `_settle` hands out tickets to
parked requests, queues the changes for the store and wakes those who wait for a change. The reply
is sent after `store.flush()`. If the store fails, no reply is sent: the process exits
(processes/buffer.py waits for `Store.failed`), and the next one gets the request again. So the
store always contains a prefix of the decisions, and no process acts on one that a crash could undo.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Mapping

from async_rl.buffer.groups import Take
from async_rl.buffer.parked import ParkedRequests
from async_rl.buffer.state import BufferState
from async_rl.buffer.store.store import Store
from async_rl.config.run import KEPT_GROUPS, RunConfig
from async_rl.core.errors import InfrastructureError, ProtocolError, require_life
from async_rl.core.types import DropReason
from async_rl.data.prompt_file import RunPrompts
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.buffer import (
    CommitStep,
    DropBatch,
    EvaluationScores,
    FailGroup,
    ForgetBefore,
    FromLearner,
    GetEvaluationScores,
    GetHistory,
    History,
    PutGroup,
    ReadSequences,
    RequestWork,
    SecureStore,
    Sequences,
    SetAside,
    StartEvaluation,
    Synced,
    SyncVersion,
    TakeBatch,
    TakenGroups,
    Work,
)
from async_rl.wire.rpc import Handler

_log = logging.getLogger(__name__)


class BufferService:
    """State, parked requests and store of one run, as asynchronous request handlers.

    clock: monotonic seconds. num_returns: how often the learner started or dropped a batch.
    """

    def __init__(
        self,
        config: RunConfig,
        prompts: RunPrompts,
        store: Store,
        *,
        clock: Callable[[], float],
        kept_groups: int = KEPT_GROUPS,
    ) -> None:
        # The newest steps whose groups the next step trains again.
        self._steps_reused = config.buffer.uses_per_group - 1
        recovered = store.reader.recover(self._steps_reused)
        self.state = BufferState(config, prompts, recovered, now_s=clock())
        self._config = config
        self._kept_steps = math.ceil(kept_groups / config.buffer.groups_per_step)
        self.store = store
        self._clock = clock
        self.parked = ParkedRequests(config, self.state, clock=clock, reopen=self._settle)
        self._changed = asyncio.Event()
        self.num_returns = 0
        self._syncing = asyncio.Lock()
        self._synced: SyncVersion | None = None
        self._learner_waits_for = ""

    def handlers(self) -> Mapping[type[Message], Handler]:
        """Return the handler of each message. A FromLearner of an earlier life is refused."""
        handlers: dict[type[Message], Handler] = {
            RequestWork: self.request_work,
            PutGroup: self.put_group,
            FailGroup: self.fail_group,
            GetHistory: self.history,
            SyncVersion: self.sync_version,
            GetEvaluationScores: self.evaluation_scores,
            TakeBatch: self.take_batch,
            ReadSequences: self.read_sequences,
            DropBatch: self.drop_batch,
            SecureStore: self.secure_store,
            CommitStep: self.commit_step,
            StartEvaluation: self.start_evaluation,
            ForgetBefore: self.forget_before,
        }
        return {
            kind: self._fenced(handler) if issubclass(kind, FromLearner) else handler
            for kind, handler in handlers.items()
        }

    def _fenced(self, handler: Handler) -> Handler:
        async def answer(request: FromLearner) -> Message:
            require_life(request.life, self.state.lives.newest)
            return await handler(request)

        return answer

    # ---- generators

    async def request_work(self, request: RequestWork) -> Message:
        """Reply with tickets within the generator's credit. A refused request is parked, until
        wait_s is over or a newer request replaces it. credit=0 reports a version.
        """
        name = request.generator
        self.state.replace(name, request.incarnation)
        if request.held is None and self.parked.update_version(request):
            await self._stored()
            return Work(tickets=[])
        tickets = []
        if request.held is not None:
            version = self.state.lives.surviving(request.life, request.version)
            most = request.credit
            tickets = self.state.hand_out_again(name, request.held, version=version, most=most)
        parked = self.parked.add(request, tickets)
        self._settle()
        try:
            if request.credit > 0 and not parked.tickets:
                async with asyncio.timeout(request.wait_s):
                    await parked.done.wait()
        except TimeoutError:
            pass
        finally:
            self.parked.withdraw(parked)
        why = "" if parked.tickets else self.parked.refusal(parked)
        await self._stored()  # first: a ticket that a crash forgets would be issued twice
        tickets = await self.state.tickets.with_drafts(parked.tickets, self.store.reader)
        return Work(tickets=tickets, waits_for=why)

    async def put_group(self, request: PutGroup) -> Message:
        """Store a complete group. If the group is not valid, its attempt has failed."""
        group = request.group
        try:
            self.state.complete(group, request.payload, self._clock())
        except ProtocolError as error:
            message = f"group {group.group_id} of {group.generator} is refused: {error}"
            _log.warning("%s", message)
            self.state.refuse(group, message)
            await self._confirm()
            raise ProtocolError(message) from error
        return await self._confirm()

    async def fail_group(self, request: FailGroup) -> Message:
        """End an attempt without a result."""
        self.state.fail(request.group_id, request.attempt, request.reason, request.message)
        if request.reason is DropReason.SCORING_OUTAGE:
            self.state.outage.failed(request.message, self._clock())
            pause_s = self.state.outage.until_s - self._clock()
            # Parked requests have no other reason to be looked at after the pause.
            asyncio.get_running_loop().call_later(pause_s, self._settle)
        return await self._confirm()

    def lose(self, generator: str, message: str, *, is_spared: bool = False) -> None:
        """The generator left; see `BufferState.lose`."""
        # First: `_settle` below would hand the returned groups to the generator that has left.
        self.parked.remove(generator)
        self.state.lose(generator, message, is_spared=is_spared)
        self._settle()

    def expire(self, listed: Collection[str]) -> float:
        """Return the tickets that are out for too long; return the seconds until the next deadline.
        listed: generators in the directory.
        """
        now_s = self._clock()
        for generator in self.state.expire(listed, now_s):
            self.parked.remove(generator)
        self._settle()
        leases = self.state.leases
        groups = self.state.admission.open.values()
        return min([leases.lease_s, *(leases.end_s(group, listed) - now_s for group in groups)])

    # ---- the learner

    async def take_batch(self, request: TakeBatch) -> Message:
        """Lease the batch of this version; the request is parked until its groups are ready."""
        num_returns = self.num_returns
        taken = Take()
        try:
            async with asyncio.timeout(request.wait_s):
                # A learner that started again or dropped a batch does not wait for this reply.
                while num_returns == self.num_returns:
                    taken = self.state.take(request.train_version, self._clock())
                    self._learner_waits_for = taken.waits_for
                    if taken.group_ids:
                        break
                    # Other groups are admitted in their place, and the learner waits for them.
                    if taken.dropped:
                        self._settle()
                    await self._changed.wait()
        except TimeoutError:
            pass
        finally:
            self._learner_waits_for = ""
        await self._stored()
        # In this order `batch_of` reads them too (store/trajectories.py).
        group_ids = sorted((*taken.group_ids, *taken.reused))
        heads = [group.head for group in await self.store.groups(group_ids)]
        return TakenGroups(groups=heads)

    async def read_sequences(self, request: ReadSequences) -> Message:
        """Reply with sequences of a leased batch."""
        # A batch that a rank reads ahead may have been dropped; its groups would stay in memory.
        self.state.replay.check_leased(request.train_version, dict(request.samples))
        found = await self.store.sequences(request.samples, request.train_version)
        return Sequences(trajectories=found)

    async def commit_step(self, request: CommitStep) -> Message:
        """The groups of the step are trained, and admission may continue."""
        self.state.commit(request.version, request.group_ids, self._clock())
        return await self._confirm()

    async def sync_version(self, request: SyncVersion) -> Message:
        """The learner starts at this version: later steps are undone and their groups ready."""
        # One at a time: a request that comes twice would undo the same steps twice.
        async with self._syncing:
            if request != self._synced:
                await self._stored()
                earliest = max(request.version - self._steps_reused, 0)
                self.store.require_history_of(earliest)
                self.state.begin_life(request.incarnation, request.version)
                self.num_returns += 1
                stored = await self.store.reader.trained_after(earliest)
                self.state.sync(request.version, stored)
                await self._confirm()
                await self.store.secure()  # no other life gets this number after a power loss
                self._synced = request
            return Synced(life=self.state.lives.newest)

    async def history(self, _: GetHistory) -> Message:
        """Reply with the versions that the learner may start from."""
        await self._stored()
        first = self.store.forgotten_before
        if first > 0:
            first += self._steps_reused
        return History(first=first, last=self.state.replay.last_start)

    async def drop_batch(self, request: DropBatch) -> Message:
        """The learner failed on this batch: drop its groups, return the groups of later leases."""
        num_batches = self.state.drop_batch(
            request.train_version, request.group_ids, request.message
        )
        self.num_returns += 1
        await self._confirm()
        return SetAside(num_batches=num_batches)

    async def secure_store(self, _: SecureStore) -> Message:
        """Write acknowledged changes to the disk, before a checkpoint that relies on it."""
        await self.store.secure()
        return Ok()

    async def start_evaluation(self, request: StartEvaluation) -> Message:
        """Open one group per held-out prompt."""
        self.state.start_evaluation(request.version)
        return await self._confirm()

    async def evaluation_scores(self, _: GetEvaluationScores) -> Message:
        """Reply with the pass rates of the versions that were evaluated."""
        return EvaluationScores(pass_rates=await self.store.reader.evaluation_scores())

    async def forget_before(self, request: ForgetBefore) -> Message:
        """Delete trajectories that neither a checkpoint nor `recording` needs, and compact the rows
        of all but the newest KEPT_GROUPS.
        """
        trained = self.state.replay.learner_version
        version = min(request.version, self.store.last_not_kept(self._config.recording, trained))
        version -= self._steps_reused
        if self.store.forgotten_before < version and request.version <= trained:
            self.store.forget_before(version)
            # The filter reads the scores of a prompt's newest group, however old that is.
            if not self._config.data.filter.is_on:
                self.store.compact(min(version, trained - self._kept_steps))
        return await self._confirm()

    # ---- for the process

    async def next_evaluation(self) -> int:
        """Wait until all groups of an evaluation are closed, and return its version."""
        while not self.state.evaluations.finished:
            await self.changed()
        return self.state.evaluations.finished.popleft()

    def waits_for(self) -> str:
        """Return what waits and why, as `ParkedRequests.waits_for`; empty if nothing waits."""
        return self.parked.waits_for(self._learner_waits_for)

    async def changed(self) -> None:
        """Wait for the next change."""
        await self._changed.wait()

    # ---- inside

    async def _confirm(self) -> Message:
        await self._stored()
        return Ok()

    def _settle(self) -> None:
        self.parked.serve()
        if made := self.state.drain_changes():
            self.store.write(made)
        # The waiters of the old event wake; who waits from now on waits for the next change.
        self._changed.set()
        self._changed = asyncio.Event()

    async def _stored(self) -> None:
        """Settle, then wait until all changes are stored; forever if they cannot be."""
        try:
            await self.store.flush_together(self._settle)
        except InfrastructureError:
            await asyncio.get_running_loop().create_future()
