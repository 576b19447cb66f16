"""The buffer: prompts and their order, admission, the ledger of groups, and the batches.

takes: requests for work, complete and failed groups from generators; takes, commits and evaluations
from the learner
waits for: nothing of its own; requests are parked until what they ask for is there
gives: tickets, batches, held-out metrics
woken by: requests, the end of a generator, deadlines
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from async_rl.buffer.evaluation import report_of
from async_rl.buffer.service import BufferService
from async_rl.buffer.store.schema import STORE_FILE
from async_rl.buffer.store.store import Store
from async_rl.core.errors import DataError
from async_rl.core.types import DropReason, Prompt, Purpose
from async_rl.data.order import PromptOrder
from async_rl.data.prompts import PromptList, load_eval_prompts, load_train_prompts
from async_rl.data.tokenizer import load_tokenizer, spare_torch
from async_rl.protocol.buffer import (
    FailGroup,
    LimitStaleness,
    PutGroup,
    ReleaseGenerator,
    RequestWork,
)
from async_rl.protocol.learner import (
    CommitStep,
    ForgetBefore,
    GetEvaluationScores,
    KeepAdvantages,
    StartEvaluation,
    SyncVersion,
    TakeBatch,
)
from async_rl.protocol.membership import DRAINING
from async_rl.runtime.context import ProcessContext

_COUNTED = (DropReason.OVER_AGE, DropReason.UNTRAINABLE, DropReason.GENERATOR_LOST)
"""Reasons that no generator counts itself."""


async def run(context: ProcessContext) -> None:
    """The buffer from its recovery to its drain."""
    config = context.config
    path = context.run_dir / STORE_FILE
    async with Store(path, durability=config.buffer.durability, clock=time.time) as store:
        with context.activity("loading prompts"):
            spare_torch(config)
            tokenizer = load_tokenizer(config, context.model_path)
            bad_row: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def refused(error: DataError) -> None:
                if not bad_row.done():
                    bad_row.set_exception(error)

            prompts = await asyncio.to_thread(_load_prompts, context, tokenizer, refused)
            decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
        service = BufferService(config, prompts, store, clock=time.monotonic)
        service.recover()
        tasks = Tasks(context, service, store)
        async with asyncio.TaskGroup() as group:
            owned = [
                group.create_task(tasks.watch_leases(), name="watch leases"),
                group.create_task(tasks.follow_generators(), name="follow generators"),
                group.create_task(
                    tasks.report_evaluations(prompts.held_out, decode), name="report evaluations"
                ),
                group.create_task(tasks.show_state(), name="show state"),
                group.create_task(store.failed(), name="watch store"),
                group.create_task(_raised(bad_row), name="watch rows"),
            ]
            await context.serve(
                {
                    RequestWork: service.request_work,
                    PutGroup: service.put_group,
                    FailGroup: service.fail_group,
                    LimitStaleness: service.limit_staleness,
                    ReleaseGenerator: service.release_generator,
                    TakeBatch: service.take_batch,
                    CommitStep: service.commit_step,
                    SyncVersion: service.sync_version,
                    StartEvaluation: service.start_evaluation,
                    GetEvaluationScores: service.evaluation_scores,
                    ForgetBefore: service.forget_before,
                    KeepAdvantages: service.keep_advantages,
                }
            )
            context.activity.rest("serving")
            await context.stopping.wait()
            for task in owned:
                task.cancel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Training prompts in the order of the run, held-out prompts as they are."""

    train: PromptList
    order: PromptOrder
    held_out: Sequence[Prompt]

    @property
    def num_held_out(self) -> int:
        """Prompts of one evaluation."""
        return len(self.held_out)

    def prompt(self, purpose: Purpose, index: int) -> Prompt:
        """The index-th prompt of the purpose's order."""
        return (
            self.train[self.order.index(index)]
            if purpose is Purpose.TRAIN
            else self.held_out[index]
        )


async def _raised(bad_row: asyncio.Future[None]) -> None:
    """Raises the DataError of a row that the configuration does not leave out, when one is met."""
    await bad_row


def _load_prompts(
    context: ProcessContext, tokenizer: Any, refused: Callable[[DataError], None]
) -> Prompts:
    config = context.config
    train = load_train_prompts(config, tokenizer, refused)
    if not train:
        raise DataError(
            f"data.train_files={config.data.train_files} gives no prompt that can be used; see the"
            " log for what was left out"
        )
    held_out = load_eval_prompts(config, tokenizer)
    limit = config.evaluation.num_prompts or len(held_out)
    return Prompts(
        train=train,
        order=PromptOrder(config.seed, len(train), shuffle=config.data.shuffle),
        held_out=held_out[:limit],
    )


class Tasks:
    """The buffer's own tasks, beside its request handlers."""

    def __init__(self, context: ProcessContext, service: BufferService, store: Store) -> None:
        self._context = context
        self._service = service
        self._store = store
        self._counted = {reason: service.drops[reason] for reason in _COUNTED}

    async def watch_leases(self) -> None:
        """takes: nothing · waits for: the next deadline of a generator or a group · gives: their
        tickets back · woken by: the clock
        """
        while True:
            alive = [member.name for member in self._context.directory.of_role("generator")]
            await asyncio.sleep(self._service.expire(alive))

    async def follow_generators(self) -> None:
        """takes: the directory · waits for: its next change · gives: tickets of generators that
        left it · woken by: the supervisor
        """
        known: dict[str, bool] = {}
        while True:
            revision = self._context.directory.revision
            now = {
                member.name: member.state == DRAINING
                for member in self._context.directory.of_role("generator")
            }
            for name in known.keys() - now.keys():
                self._service.desk.lose(name, "", "it left the fleet", is_spared=known[name])
            known = now
            await self._context.directory.changed(revision)

    async def report_evaluations(
        self, held_out: Sequence[Prompt], decode: Callable[[Sequence[int]], str]
    ) -> None:
        """takes: finished evaluations · waits for: the next · gives: held-out metrics of their step
        · woken by: their last group
        """
        while True:
            version = await self._service.finished_evaluations.get()
            await self._store.flush()
            report = await report_of(
                self._store,
                version,
                held_out,
                decode,
                extraction=self._context.config.reward.extraction,
            )
            if report.num_failed:
                self._context.log.warning(
                    "evaluation of version %d: %d prompts have no sample and do not count",
                    version,
                    report.num_failed,
                )
            await self._context.report(version, scalars=report.scalars, texts=report.texts)
            self._store.finish_evaluation(version, report.scalars)
            await self._store.flush()

    async def show_state(self) -> None:
        """takes: the service's state · waits for: its change · gives: gauges and what is waited for
        · woken by: every change
        """
        activity = self._context.activity
        shown = ""
        with contextlib.ExitStack() as stack:
            while True:
                for state, number in self._service.queue().items():
                    activity.gauge(f"queue/{state}", number)
                for reason in _COUNTED:
                    activity.count(
                        f"failures/{reason}", self._service.drops[reason] - self._counted[reason]
                    )
                    self._counted[reason] = self._service.drops[reason]
                self._context.version = self._service.replay.learner_version
                if (text := self._service.waits_for()) != shown:
                    stack.close()
                    shown = text
                    if text:
                        held = (
                            activity.waiting
                            if text.startswith(("groups:", "evaluation"))
                            else activity.blocked
                        )
                        stack.enter_context(held(text))
                await self._service.changed()
