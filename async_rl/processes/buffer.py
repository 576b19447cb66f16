"""The buffer: prompts and their order, admission, the ledger of groups, and the batches.

takes: requests for work, complete and failed groups from generators; takes, commits and evaluations
from the learner
waits for: requests; it parks those that cannot be answered yet
returns: tickets, batches, held-out metrics
woken by: requests, the end of a generator, deadlines
"""

import asyncio
import contextlib
import functools
import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence

from async_rl.buffer.evaluation import report_of
from async_rl.buffer.service import BufferService
from async_rl.buffer.store.connection import STORE_FILE
from async_rl.buffer.store.store import Store
from async_rl.config.pools import group_role
from async_rl.core.types import DropReason, Prompt
from async_rl.data.prompt_file import PROMPTS_FILE, open_prompts
from async_rl.data.tokenizer import load_tokenizer, load_vocabulary_size, spare_torch
from async_rl.protocol.membership import DRAINING
from async_rl.runtime.context import ProcessContext

OBJECTS_PER_COLLECTION = 50_000
"""The groups in memory are some hundred thousand objects without a cycle. With Python's own 700,
collections took half of the time of a group.
"""
_COUNTED = (DropReason.OVER_AGE, DropReason.UNTRAINABLE, DropReason.GENERATOR_LOST)
"""Reasons that no generator counts itself."""


async def run(context: ProcessContext) -> None:
    """The buffer from its recovery to its drain."""
    gc.set_threshold(OBJECTS_PER_COLLECTION)
    config = context.config
    path = context.run_dir / STORE_FILE
    async with Store(path, clock=time.time) as store:
        with context.activity("loading prompts"):
            # The buffer has no model, and transformers would load torch, which takes 260 MB.
            spare_torch(config)
            tokenizer = load_tokenizer(config, context.model_path)
            vocabulary_size = load_vocabulary_size(config, context.model_path)
            prompts = open_prompts(
                context.run_dir / PROMPTS_FILE, config, vocabulary_size=vocabulary_size
            )
            decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
        service = BufferService(config, prompts, store, clock=time.monotonic)
        tasks = Tasks(context, service, store)
        await context.serve(service.handlers())
        owned = {
            "watch leases": tasks.watch_leases(),
            "follow generators": tasks.follow_generators(),
            "report evaluations": tasks.report_evaluations(prompts.held_out, decode),
            "show state": tasks.show_state(),
        }
        # The handlers work until a stop; only a store that fails ends them earlier.
        await context.work_until_stopped(store.failed(), owned)


class Tasks:
    """The buffer's own tasks, next to its request handlers."""

    def __init__(self, context: ProcessContext, service: BufferService, store: Store) -> None:
        self._context = context
        self._service = service
        self._store = store
        self._counted: Counter[str] = Counter()
        self._role = group_role(context.config)

    async def watch_leases(self) -> None:
        """takes: the directory · waits for: the next deadline of a ticket · returns: expired
        tickets to admission · woken by: the clock
        """
        while True:
            listed = [member.name for member in self._context.directory.of_role(self._role)]
            # Until a deadline, not for a fixed time: most of them never expire.
            await asyncio.sleep(self._service.expire(listed))

    async def follow_generators(self) -> None:
        """takes: the directory · waits for: its next change · returns: tickets of generators that
        left it to admission · woken by: the supervisor
        """
        was_draining: dict[str, bool] = {}
        while True:
            revision = self._context.directory.revision
            is_draining = {
                member.name: member.state == DRAINING
                for member in self._context.directory.of_role(self._role)
            }
            # A generator that drained left on request, so its attempts do not count.
            for name in was_draining.keys() - is_draining.keys():
                self._service.lose(name, "it left the fleet", is_spared=was_draining[name])
            was_draining = is_draining
            await self._context.directory.changed(revision)

    async def report_evaluations(
        self, held_out: Sequence[Prompt], decode: Callable[[Sequence[int]], str]
    ) -> None:
        """takes: finished evaluations · waits for: the next one · returns: held-out metrics of
        their step · woken by: their last group
        """
        extraction = self._context.config.reward.extraction
        reader = self._store.reader
        while True:
            version = await self._service.next_evaluation()
            num_returns = self._service.num_returns
            # On the disk first: a row of metrics that survives a power loss stays, so the groups
            # that it describes must not be made again.
            await self._store.secure()
            scalars, num_failed = await report_of(
                reader, version, held_out, decode, extraction=extraction
            )
            if num_failed:
                self._context.log.warning(
                    "evaluation of version %d: %d prompts have no sample and do not count",
                    version,
                    num_failed,
                )
            await self._context.report(version, scalars=scalars)
            # Figures of discarded weights must not be booked on those that are evaluated next.
            if self._service.num_returns == num_returns:
                self._store.finish_evaluation(version, scalars)
                await self._store.flush()
            else:
                self._service.state.evaluations.report_closed(version)

    async def show_state(self) -> None:
        """takes: the buffer's state · waits for: its change · returns: gauges, counts and the
        reason of a wait · woken by: every change
        """
        shown = ""
        with contextlib.ExitStack() as stack:
            while True:
                self._count()
                waits_for = self._service.waits_for()
                if waits_for != shown:
                    stack.close()
                    shown = waits_for
                    if waits_for:
                        stack.enter_context(self._waiting(waits_for))
                await self._service.changed()

    def _count(self) -> None:
        state = self._service.state
        for name, number in state.queue().items():
            self._context.activity.gauge(f"queue/{name}", number)
        # An activity counts events, so it gets what is new since the last call.
        totals = {reason: state.drops[reason] for reason in _COUNTED}
        totals[DropReason.INVALID] = state.num_refused
        for reason, total in totals.items():
            self._context.activity.count(f"failures/{reason}", total - self._counted[reason])
        self._counted = Counter(totals)
        self._context.version = state.replay.learner_version

    def _waiting(self, waits_for: str) -> contextlib.AbstractContextManager[None]:
        # Waiting is for other processes to finish something; blocked is held back by the bound of
        # staleness, which costs throughput and is a separate share in the metrics.
        if waits_for.startswith(("groups:", "evaluation")):
            return self._context.activity.waiting(waits_for)
        return self._context.activity.blocked(waits_for)
