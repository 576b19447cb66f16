"""Rank 0's requests for batches, and the time after which a missing batch ends the run."""

from __future__ import annotations

import time

from async_rl.config.pools import evaluates_only
from async_rl.core.errors import DeadlineExceeded
from async_rl.core.heads import GroupHead
from async_rl.protocol.learner import TakeBatch, TakenGroups
from async_rl.runtime.context import ProcessContext
from async_rl.training.device import Device
from async_rl.training.ranks import TrainingPool

_WAIT_S = 10.0
"""The buffer answers after this long, so that the learner notices when generators leave."""


class Taker:
    """Takes batches from the buffer, across its restarts, and lets the ranks read them."""

    def __init__(
        self, context: ProcessContext, device: Device, pool: TrainingPool, *, life: int
    ) -> None:
        self._life = life
        self._pool = pool
        self._config = context.config
        self._directory = context.directory
        self._device = device
        self._buffer = context.peer("buffer")

    async def take(self, first: int) -> list[list[GroupHead]]:
        """Return the batches to train from version `first` on, without a wait between them, once
        every rank has its sequences of them.

        One batch; on a shared device those of all steps up to the next push.
        """
        every = self._config.weights.push_every_steps if self._device.is_shared else 1
        end = min(first + every - first % every, self._config.num_steps)
        batches = []
        for version in range(first, end):
            batches.append(await self._take(version))
            # Twice: the buffer may die and come back.
            timeout_s = 2 * self._config.timeouts.start_s
            await self._pool.fetch(batches[-1], version, life=self._life, timeout_s=timeout_s)
        return batches

    async def _take(self, train_version: int) -> list[GroupHead]:
        """Return the batch that will be trained on weights of `train_version`.

        Raises DeadlineExceeded if generators work and no batch comes.
        """
        limit_s = self._config.timeouts.take_s
        request = TakeBatch(life=self._life, train_version=train_version, wait_s=_WAIT_S)
        # Long enough for the buffer to die and come back.
        timeout_s = _WAIT_S + self._config.timeouts.start_s
        deadline_s = time.monotonic() + limit_s
        while True:
            taken: TakenGroups = await self._buffer.call(request, timeout_s=timeout_s)
            if taken.groups:
                return taken.groups
            if not self._may_come():
                deadline_s = time.monotonic() + limit_s
            elif time.monotonic() > deadline_s:
                raise DeadlineExceeded(
                    f"no batch for version {train_version} within {limit_s:g} s"
                    f" (timeouts.stall_s / 3); the buffer waits for {taken.waits_for}"
                )

    def _may_come(self) -> bool:
        """Return whether a generator may produce training groups now.

        None does while the learner has a shared device, or while the run is scaled to none.
        """
        if self._device.is_shared and self._device.is_learners:
            return False
        generators = self._directory.of_role("generator")
        return not all(evaluates_only(self._config, member.name) for member in generators)
