"""The learner of a training service.

takes: requests from the front, each run's in the order of their numbers
waits for: requests; they are executed one after another in one thread
sends: numbers of each optimizer step to the supervisor
woken by: the front; `stopping` (save the states, then leave)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from async_rl.protocol.base import Message, Ok
from async_rl.protocol.service import AskPosition, Execute, Release
from async_rl.runtime.context import ProcessContext
from async_rl.service.training import TrainingRuns

T = TypeVar("T")


async def serve(context: ProcessContext, device: torch.device) -> None:
    """Execute the requests of a service's training runs until the process has to stop."""
    loop = asyncio.get_running_loop()
    directory = context.run_dir / "service" / "runs"
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer") as thread:

        def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
            return loop.run_in_executor(thread, work)

        def load() -> TrainingRuns:
            return TrainingRuns(context.config, context.model_path, directory, device)

        with context.activity("loading the model"):
            runs = await in_thread(load)

        async def execute(request: Execute) -> Message:
            with context.activity(request.operation.replace("_", " ")):
                executed = await in_thread(lambda: runs.execute(request))
            context.activity.count("tokens_trained", executed.tokens)
            while runs.reports:
                step, scalars = runs.reports.pop(0)
                context.version = step
                await context.report(step, scalars=scalars)
            return executed

        async def position(request: AskPosition) -> Message:
            return await in_thread(lambda: runs.position(request.run_id))

        async def release(request: Release) -> Message:
            await in_thread(lambda: runs.release(request.run_id))
            return Ok()

        await context.serve({AskPosition: position, Execute: execute, Release: release})
        await context.stopping.wait()
        with context.activity("saving the training runs"):
            await in_thread(runs.close)
