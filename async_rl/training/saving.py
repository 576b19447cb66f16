"""Rank 0's side of the checkpoints: it loads one at the start of a life, writes new ones when they
are due, and deletes old ones.

The learner waits until the store is on the disk and for the copy to memory, not for the writing.
After each checkpoint the buffer deletes the trajectories that no kept checkpoint could need.
"""

import asyncio
import time
from concurrent.futures import Future
from pathlib import Path

from async_rl.core.errors import ProtocolError
from async_rl.core.os import sync
from async_rl.protocol.buffer import (
    EvaluationScores,
    ForgetBefore,
    GetEvaluationScores,
    GetHistory,
    History,
    SecureStore,
    StartFrom,
    Synced,
    SyncVersion,
)
from async_rl.runtime.context import ProcessContext
from async_rl.training import checkpoints
from async_rl.training.mirror import Mirror
from async_rl.training.operations import Restore, Save
from async_rl.training.ranks import TrainingPool


async def resume(context: ProcessContext, pool: TrainingPool) -> StartFrom:
    """Load the newest checkpoint that can be used, if any; report its version to buffer and
    supervisor, and return it with the number of this life. Raises DataError if there are
    checkpoints but none can be used.

    The newest checkpoint cannot be used if its files are damaged, or if the store is behind it
    because the store was damaged. Then an older one is loaded, and its later steps are trained
    again.
    """
    while True:
        version = await _load(context, pool)
        sync = SyncVersion(version=version, incarnation=context.incarnation)
        try:
            # The buffer first: it refuses earlier lives of the learner from now on.
            synced: Synced = await context.call_buffer(sync)
        except ProtocolError:
            # Until now an earlier life may have completed a newer checkpoint, for which the buffer
            # has deleted the trajectories of the steps after this one.
            history: History = await context.call_buffer(GetHistory())
            if history.first <= version:
                raise
        else:
            break
    start = StartFrom(life=synced.life, version=version)
    await context.supervisor.call(start)
    return start


async def _load(context: ProcessContext, pool: TrainingPool) -> int:
    """Load the newest checkpoint that can be used, if any; return its version."""
    history: History = await context.call_buffer(GetHistory())
    with context.activity("verifying the checkpoint"):
        directory, refused = await asyncio.to_thread(
            checkpoints.choose, context.run_dir, first=history.first, last=history.last
        )
    version = 0
    if directory is not None:
        with context.activity("loading the checkpoint"):
            version = await pool.lead(Restore(directory=str(directory)))
        context.log.info("resumes from %s", directory)
    for path, reason in refused.items():
        # Its name is free for the checkpoint of the same version in the history that starts now.
        aside = checkpoints.set_aside(path)
        context.log.warning(
            "%s is not used: %s; the steps after %d are trained again, and it is kept as %s",
            path.name,
            reason,
            version,
            aside.name,
        )
    context.version = version
    return version


class Saver:
    """Writes checkpoints in tasks of the process. A checkpoint that cannot be written stops the
    process.
    """

    def __init__(self, context: ProcessContext, pool: TrainingPool, *, life: int) -> None:
        self._context = context
        self._config = context.config.checkpoint
        self._pool = pool
        self._life = life
        self._saved_s = time.monotonic()
        self._writing: asyncio.Task[None] | None = None
        mirror = self._config.mirror
        self._mirror = None if mirror is None else Mirror(mirror, context.run_dir)

    def is_due(self, version: int) -> bool:
        """Return whether to save this version, by steps or by time."""
        every_s = 60 * self._config.every_minutes
        by_steps = self._config.every_steps > 0 and version % self._config.every_steps == 0
        return by_steps or (every_s > 0 and time.monotonic() - self._saved_s >= every_s)

    async def save(self, version: int) -> None:
        """Start the checkpoint of this version, after the previous checkpoint is complete."""
        await self.finish()
        directory = checkpoints.directory_of(self._context.run_dir, version)
        # A resumed run comes to the step of the checkpoint that it loaded.
        if directory.is_dir():
            return
        # From the start of the writing: slow storage must not make checkpoints rarer.
        self._saved_s = time.monotonic()
        with self._context.activity("saving"):
            # Before the names in the run's directory are put on the disk.
            directory.parent.mkdir(exist_ok=True)
            # After a power loss the store must not be behind a complete checkpoint.
            await self._context.call_buffer(SecureStore(life=self._life))
            await asyncio.to_thread(_sync_rows, self._context.run_dir)
            save = Save(version=version, directory=str(directory))
            written: Future[None] = await self._pool.lead(save)
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
        scores: EvaluationScores = await self._context.call_buffer(request)
        # In a thread: deleting large files blocks for seconds on some file systems.
        oldest = await asyncio.to_thread(
            checkpoints.prune,
            self._context.run_dir,
            keep=self._config.keep,
            keep_best=self._config.keep_best,
            scores=scores.pass_rates,
        )
        # Before the buffer forgets: the copied ledger must have this checkpoint's trajectories.
        if self._mirror is not None:
            await asyncio.to_thread(self._mirror.update)
        forget = ForgetBefore(life=self._life, version=oldest)
        await self._context.call_buffer(forget)


def _sync_rows(run_dir: Path) -> None:
    """Put the records of the steps so far on the disk. The supervisor and the pushes, which write
    them, must not wait for a disk.
    """
    for path in run_dir.glob("*.jsonl"):
        sync(path)
