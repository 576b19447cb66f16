"""A worker process: `python -m async_rl.rollouts.agent_worker module:function`.

takes: tasks from the gateway, over the pipes of rewards/child_process.py
waits for: the user's functions, which run at the same time: async ones as tasks, others in threads
returns: a result per task
woken by: a task; the end of the pipe stops the process
"""

import asyncio
import inspect
import sys
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from async_rl.config.plugins import AGENT, load_function
from async_rl.core.frozen import Value
from async_rl.rewards.child_process import ParentPipes
from async_rl.sessions.endpoint import Endpoint

# A thread waits for the policy most of the time; more samples of one worker than this wait for one.
_MOST_THREADS = 256
# Far above any dict of rewards. A larger result would fill the gateway's memory.
_MOST_BYTES = 16 << 20


class Task(Value):
    """One call of the function."""

    endpoint: Endpoint
    task: dict[str, Any]


class Done(Value):
    """Its result, as JSON. error: empty if the function returned `value`."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""


async def _call(function: Callable[..., Any], task: Task) -> Done:
    call: Awaitable[Any]
    if inspect.iscoroutinefunction(function):
        call = function(task.task, task.endpoint)
    else:
        call = asyncio.to_thread(function, task.task, task.endpoint)
    # The user's code; its failure is data of the sample.
    value: Any = (await asyncio.gather(call, return_exceptions=True))[0]
    if isinstance(value, BaseException):
        # The last lines name the author's line that raised.
        return Done(error="".join(traceback.format_exception(value)[-3:]))
    # Numbers of other packages become text. The gateway refuses what is not a reward.
    encoded = msgspec.json.encode(value, enc_hook=str)
    if len(encoded) > _MOST_BYTES:
        return Done(error="the function returned more than 16 MB; return a number or a small dict")
    return Done(value=msgspec.Raw(encoded))


async def _serve() -> None:
    parent = ParentPipes()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_MOST_THREADS))
    function = load_function("rollout.fn", sys.argv[1], AGENT)

    async def answer(number: int, task: Task) -> None:
        parent.send(number, await _call(function, task))

    await parent.serve(Task, answer)


if __name__ == "__main__":
    asyncio.run(_serve())
