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
from async_rl.buffer.state import BufferState
from async_rl.buffer.store.store import Store
from async_rl.config.pools import group_role
from async_rl.core.types import DropReason, Prompt
from async_rl.data.prompt_file import PROMPTS_FILE, open_prompts
from async_rl.data.tokenizer import load_tokenizer, load_vocabulary_size, spare_torch
from async_rl.protocol.supervisor import DRAINING
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
    async with Store(context.run_dir, clock=time.time) as store:
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
        await context.serve(service.handlers())
        owned = {
            "watch generators": watch_generators(context, service),
            "report evaluations": report_evaluations(context, service, prompts.held_out, decode),
            "show state": show_state(context, service),
        }
        # The handlers work until a stop; only a store that fails ends them earlier.
        await context.work_until_stopped(store.failed(), owned)


async def watch_generators(context: ProcessContext, service: BufferService) -> None:
    """takes: the directory · waits for: its next change, or the next deadline of a ticket ·
    returns: tickets of generators that left it, and expired ones, to admission · woken by: the
    supervisor, the clock
    """
    was_draining: dict[str, bool] = {}
    role = group_role(context.config)
    while True:
        revision = context.directory.revision
        is_draining = {
            member.name: member.state == DRAINING for member in context.directory.of_role(role)
        }
        # A generator that drained left on request, so its attempts do not count.
        for name in was_draining.keys() - is_draining.keys():
            service.lose(name, "it left the fleet", is_spared=was_draining[name])
        was_draining = is_draining
        # Until a deadline, not for a fixed time: most of them never expire.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(service.expire(is_draining)):
                await context.directory.changed(revision)


async def report_evaluations(
    context: ProcessContext,
    service: BufferService,
    held_out: Sequence[Prompt],
    decode: Callable[[Sequence[int]], str],
) -> None:
    """takes: finished evaluations · waits for: the next one · returns: held-out metrics of
    their step · woken by: their last group
    """
    extraction = context.config.reward.extraction
    store = service.store
    while True:
        version = await service.next_evaluation()
        num_returns = service.num_returns
        # On the disk first: a row of metrics that survives a power loss stays, so the groups
        # that it describes must not be made again.
        await store.secure()
        scalars, num_failed = await report_of(
            store.reader, version, held_out, decode, extraction=extraction
        )
        if num_failed:
            context.log.warning(
                "evaluation of version %d: %d prompts have no sample and do not count",
                version,
                num_failed,
            )
        await context.report(version, scalars=scalars)
        # Figures of discarded weights must not be booked on those that are evaluated next.
        if service.num_returns == num_returns:
            store.finish_evaluation(version, scalars)
            await store.flush()
        else:
            service.state.evaluations.report_closed(version)


async def show_state(context: ProcessContext, service: BufferService) -> None:
    """takes: the buffer's state · waits for: its change · returns: gauges, counts and the
    reason of a wait · woken by: every change
    """
    shown = ""
    activity = context.activity
    counted: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        while True:
            counted = _count(context, service.state, counted)
            waits_for = service.waits_for()
            if waits_for != shown:
                stack.close()
                shown = waits_for
                # Waiting is for other processes to finish something; blocked is held back by the
                # bound of staleness, which costs throughput and is a separate share in the metrics.
                if waits_for.startswith(("groups:", "evaluation")):
                    stack.enter_context(activity.waiting(waits_for))
                elif waits_for:
                    stack.enter_context(activity.blocked(waits_for))
            await service.changed()


def _count(context: ProcessContext, state: BufferState, counted: Counter[str]) -> Counter[str]:
    """Report the groups in each state, and the failures since `counted`; return all failures."""
    for name, number in state.queue().items():
        context.activity.gauge(f"queue/{name}", number)
    totals: Counter[str] = Counter({reason: state.drops[reason] for reason in _COUNTED})
    totals[DropReason.INVALID] = state.num_refused
    # An activity counts events, so it gets what is new since the last call.
    for reason, total in totals.items():
        context.activity.count(f"failures/{reason}", total - counted[reason])
    context.version = state.replay.learner_version
    return totals
