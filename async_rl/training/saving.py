"""Rank 0's side of the checkpoints: when one is due, which are kept, what the buffer may delete.

The learner waits until the store is on the disk and for the copy to memory, not for the writing.
After each checkpoint the buffer deletes the trajectories that no kept checkpoint could need.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future

from async_rl.protocol.learner import (
    EvaluationScores,
    ForgetBefore,
    GetEvaluationScores,
    SecureStore,
)
from async_rl.runtime.context import ProcessContext
from async_rl.training import checkpoints
from async_rl.training.mirror import Mirror
from async_rl.training.ranks import TrainingPool


class Saver:
    """Writes checkpoints in tasks of the process, which ends if one cannot be written.

    clock: monotonic seconds.
    """

    def __init__(
        self,
        context: ProcessContext,
        pool: TrainingPool,
        *,
        life: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._config = context.config.checkpoint
        self._pool = pool
        self._life = life
        self._buffer = context.peer("buffer")
        # Long enough for the buffer to die and come back.
        self._call_s = context.config.timeouts.start_s
        self._clock = clock
        self._saved_s = clock()
        self._writing: asyncio.Task[None] | None = None
        mirror = self._config.mirror
        self._mirror = None if mirror is None else Mirror(mirror, context.run_dir)

    def is_due(self, version: int) -> bool:
        """Return whether to save this version, by steps or by time."""
        every_s = 60 * self._config.every_minutes
        by_steps = self._config.every_steps > 0 and version % self._config.every_steps == 0
        return by_steps or (every_s > 0 and self._clock() - self._saved_s >= every_s)

    async def save(self, version: int) -> None:
        """Begin the checkpoint of this version, after the one before is complete."""
        await self.finish()
        directory = checkpoints.directory_of(self._context.run_dir, version)
        # A resumed run comes to the step of the checkpoint that it loaded.
        if directory.is_dir():
            return
        self._saved_s = self._clock()
        with self._context.activity("saving"):
            # First: after a power loss the store must not be behind a complete checkpoint.
            await self._buffer.call(SecureStore(life=self._life), timeout_s=self._call_s)
            directory.parent.mkdir(exist_ok=True)
            written = await self._pool.save(directory, version)
        self._writing = self._context.group.create_task(
            self._complete(written), name=f"checkpoint {version}"
        )

    async def finish(self) -> None:
        """Return once the checkpoint that is being written is complete."""
        if self._writing is not None:
            with self._context.activity.waiting("the checkpoint to be written"):
                await self._writing
            self._writing = None

    async def _complete(self, written: Future[None]) -> None:
        await asyncio.wrap_future(written)
        request = GetEvaluationScores()
        scores: EvaluationScores = await self._buffer.call(request, timeout_s=self._call_s)
        oldest = await asyncio.to_thread(
            checkpoints.prune,
            self._context.run_dir,
            keep=self._config.keep,
            keep_best=self._config.keep_best,
            scores=scores.pass_rates,
        )
        # Before the buffer forgets: the copy of the ledger must have what this checkpoint needs.
        if self._mirror is not None:
            await asyncio.to_thread(self._mirror.update)
        forget = ForgetBefore(life=self._life, version=oldest)
        await self._buffer.call(forget, timeout_s=self._call_s)
