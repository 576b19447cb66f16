"""Rank 0's side of the checkpoints: when one is due, what is kept, and what the buffer may forget.

The copy to memory holds the learner up, the writing does not. After each checkpoint the buffer
deletes the trajectories that no kept checkpoint could need. Used by learner.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from async_rl.protocol.learner import EvaluationScores, ForgetBefore, GetEvaluationScores
from async_rl.runtime.context import ProcessContext
from async_rl.training import checkpoints
from async_rl.training.mirror import Mirror
from async_rl.training.ranks import TrainingPool


class Saver:
    """Writes checkpoints in tasks of `group`, which ends if one cannot be written. clock: monotonic
    seconds.
    """

    def __init__(
        self,
        context: ProcessContext,
        ranks: TrainingPool,
        group: asyncio.TaskGroup,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._config = context.config.checkpoint
        self._ranks = ranks
        self._group = group
        self._clock = clock
        self._saved_s = clock()
        self._writing: asyncio.Task[None] | None = None
        self._mirror = (
            Mirror(self._config.mirror, context.run_dir)
            if self._config.mirror is not None
            else None
        )

    def is_due(self, version: int) -> bool:
        """Whether this version is to be saved, by steps or by time."""
        every_s = 60 * self._config.every_minutes
        by_steps = self._config.every_steps > 0 and version % self._config.every_steps == 0
        return by_steps or (every_s > 0 and self._clock() - self._saved_s >= every_s)

    async def save(self, version: int) -> None:
        """Begins the checkpoint of this version; the one before is complete then."""
        await self.finish()
        directory = checkpoints.directory_of(self._context.run_dir, version)
        if directory.is_dir():
            return
        self._saved_s = self._clock()
        with self._context.activity("saving"):
            directory.parent.mkdir(exist_ok=True)
            written = await self._ranks.save(directory, version)
        self._writing = self._group.create_task(
            self._complete(asyncio.wrap_future(written)), name=f"checkpoint {version}"
        )

    async def finish(self) -> None:
        """Returns once the checkpoint that is being written is complete."""
        if self._writing is not None:
            with self._context.activity.waiting("the checkpoint to be written"):
                await self._writing
            self._writing = None

    async def _complete(self, written: asyncio.Future[None]) -> None:
        await written
        buffer, timeout_s = (
            self._context.peer("buffer"),
            self._context.config.supervisor.start_timeout_s,
        )
        told: EvaluationScores = await buffer.call(GetEvaluationScores(), timeout_s=timeout_s)
        oldest = await asyncio.to_thread(
            checkpoints.prune,
            self._context.run_dir,
            keep=self._config.keep,
            keep_best=self._config.keep_best,
            scores=told.pass_rates,
        )
        if self._mirror is not None:
            await asyncio.to_thread(self._mirror.update)
        await buffer.call(ForgetBefore(version=oldest), timeout_s=timeout_s)
