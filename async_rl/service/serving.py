"""The learner of a training service.

takes: requests from the front, each run's in the order of their numbers
waits for: requests; they are executed one after another in one thread
sends: numbers of each optimizer step to the supervisor
woken by: the front; `stopping` (leave: the front executes again what no state has)
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from async_rl.learner.loading import learner_device
from async_rl.protocol.base import Message
from async_rl.protocol.service import Execute
from async_rl.runtime.context import ProcessContext
from async_rl.service.training import TrainingRuns


async def run(context: ProcessContext) -> None:
    """Execute the requests of a service's training runs until the process has to stop."""
    loop = asyncio.get_running_loop()
    device = learner_device(context.config.learner.gpus_each)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer") as thread:
        with context.activity("loading the model"):
            runs = await loop.run_in_executor(
                thread, TrainingRuns, context.config, context.model_path, device
            )

        async def execute(request: Execute) -> Message:
            with context.activity(request.operation.replace("_", " ")):
                executed = await loop.run_in_executor(thread, runs.execute, request)
            context.activity.count("tokens_trained", executed.tokens)
            while runs.reports:
                step, scalars = runs.reports.pop(0)
                context.version = step
                await context.report(step, scalars=scalars)
            return executed

        await context.serve({Execute: execute})
        await context.stopping.wait()
