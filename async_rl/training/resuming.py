"""The start of a life of the learner: choose a checkpoint, load it, take over from earlier lives.

The newest checkpoint may not fit: its files are damaged, or the store is behind it because it was
damaged too. Then an older one is used, and its later steps are trained again.
"""

from __future__ import annotations

import asyncio

from async_rl.core.frozen import frozen
from async_rl.protocol.learner import GetHistory, History, StartFrom, Synced, SyncVersion
from async_rl.runtime.context import ProcessContext
from async_rl.training import checkpoints
from async_rl.training.ranks import TrainingPool


@frozen
class Start:
    """The version that a life of the learner starts from, and the number of the life."""

    version: int
    life: int


async def resume(context: ProcessContext, pool: TrainingPool) -> Start:
    """Load the newest checkpoint that can be used, if any; report its version to buffer and
    supervisor. Raises DataError if there are checkpoints but none can be used.
    """
    buffer = context.peer("buffer")
    # Long enough for the buffer to die and come back.
    call_s = context.config.timeouts.start_s
    history: History = await buffer.call(GetHistory(), timeout_s=call_s)
    with context.activity("verifying the checkpoint"):
        choice = await asyncio.to_thread(
            checkpoints.choose, context.run_dir, first=history.first, last=history.last
        )
    if choice.directory is not None:
        with context.activity("loading the checkpoint"):
            await pool.load(choice.directory)
        context.log.info("resumes from %s", choice.directory)
    for refused, reason in choice.refused.items():
        # Its name is free for the checkpoint of the same version in the history that starts now.
        aside = checkpoints.set_aside(refused)
        context.log.warning(
            "%s is not used: %s; the steps after %d are trained again, and it is kept as %s",
            refused.name,
            reason,
            choice.version,
            aside.name,
        )
    context.version = choice.version
    sync = SyncVersion(version=choice.version, incarnation=context.incarnation)
    synced: Synced = await buffer.call(sync, timeout_s=call_s)
    await context.supervisor.call(
        StartFrom(version=choice.version), timeout_s=context.config.timeouts.call_s
    )
    return Start(version=choice.version, life=synced.life)
