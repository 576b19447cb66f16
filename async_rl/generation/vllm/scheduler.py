"""vLLM's scheduler with one rule more: no request reads the prefix cache of older weights.

Each block of the cache is hashed with the salt of its request, and the salt is the number of
weight changes. A change of weights finishes when the scheduler leaves its pause; requests that wait
then have not been computed yet, so the new weights will compute them, and they take the new salt. A
label would not do: a learner that resumed from a checkpoint trains the same version again, to other
weights.

Written against vLLM 0.32.
"""

import multiprocessing
import time
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from async_rl.core.os import die_with_parent

if multiprocessing.parent_process() is not None:
    # The process of vLLM's core: outliving a killed generator, it would keep the model's memory.
    die_with_parent()

SALTING_SCHEDULER = f"{__name__}.salting_scheduler"
"""The value of vLLM's `scheduler_cls`, which its core resolves in its own process."""


def salting_scheduler(vllm_config: VllmConfig, **options: Any) -> Scheduler:
    """Make the scheduler that vLLM would make, with salts."""
    is_async = vllm_config.scheduler_config.async_scheduling
    kind = _SaltingAsync if is_async else _Salting
    return kind(vllm_config=vllm_config, **options)


class _Salting(Scheduler):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._num_changes = 0

    def add_request(self, request: Request) -> None:
        """Queue a request under the salt of the present weights."""
        self._salt(request)
        super().add_request(request)

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pause, or continue with other weights."""
        super().set_pause_state(pause_state)
        if pause_state is PauseState.UNPAUSED:
            self._num_changes += 1
            self._prefill_again()
            for request in self.waiting:
                self._salt(request)

    def _prefill_again(self) -> None:
        """Let the partly prefilled requests start again: prefilling the rest by other weights
        would give them tokens of a distribution that no version has, under the label of the new.
        """
        for request in [request for request in self.running if request.is_prefill_chunk]:
            self.running.remove(request)
            self._preempt_request(request, time.monotonic(), drop_stale_output=True)
            # It may run in the next step: workers must not continue it from the last one.
            self.prev_step_scheduled_req_ids.discard(request.request_id)

    def _salt(self, request: Request) -> None:
        request.cache_salt = str(self._num_changes)
        request.block_hashes.clear()
        request.update_block_hashes()


class _SaltingAsync(_Salting, AsyncScheduler):
    pass
