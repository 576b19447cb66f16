"""A worker process: `python -m async_rl.sessions.worker module:function`.

takes: tasks, one line of JSON each, on standard input
waits for: the user's functions, which run at the same time: async ones as tasks, others in threads
returns: results, one line of JSON each; the functions' prints go to standard error
woken by: a line; the end of standard input stops the process
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

import msgspec

from async_rl.config.plugins import AGENT, load_function
from async_rl.core.frozen import frozen

MODEL = "policy"
"""The name under which every endpoint serves the model that is trained."""
# A thread waits for the policy most of the time; more samples of one worker than this wait for one.
_MOST_THREADS = 256


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One call of the function."""

    number: int
    url: str
    token: str
    task: dict[str, Any]


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """Its result. error: empty if the function returned `value`."""

    number: int
    value: Any = None
    error: str = ""


@frozen
class Endpoint:
    """The second argument of an agent's function: how it reaches the policy.

    base_url, api_key and model are the arguments of `openai.OpenAI` and of its calls; session_url
    takes rewards (docs/agents.md).
    """

    base_url: str
    api_key: str
    model: str
    session_url: str


async def _run(function: Callable[..., Any], out: BinaryIO) -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(_MOST_THREADS))
    reader = asyncio.StreamReader(limit=1 << 26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    async def one(task: Task) -> None:
        endpoint = Endpoint(
            base_url=f"{task.url}/v1",
            api_key=task.token,
            model=MODEL,
            session_url=f"{task.url}/v1/session",
        )
        call: Awaitable[Any]
        if inspect.iscoroutinefunction(function):
            call = function(task.task, endpoint)
        else:
            call = asyncio.to_thread(function, task.task, endpoint)
        # The user's code; its failure is data of the sample.
        results = await asyncio.gather(call, return_exceptions=True)
        value: Any = results[0]
        if isinstance(value, BaseException):
            text = "".join(traceback.format_exception(value)[-3:])
            done = Done(number=task.number, error=text)
        elif value is None or isinstance(value, float | int | dict):
            done = Done(number=task.number, value=value)
        else:
            text = f"the function returned {value!r}, which is not a reward; return a number, a"
            done = Done(number=task.number, error=f"{text} dict of numbers, or nothing")
        line = msgspec.json.encode(done, enc_hook=str)
        out.write(line + b"\n")
        out.flush()

    async with asyncio.TaskGroup() as group:
        while line := await reader.readline():
            group.create_task(one(msgspec.json.decode(line, type=Task)))


def main() -> None:
    """Serve calls until the gateway closes standard input."""
    out = os.fdopen(os.dup(1), "wb")
    # The function may print; redirect that to standard error, or it would be read as a result.
    os.dup2(2, 1)
    function = load_function("rollout.fn", sys.argv[1], AGENT)
    asyncio.run(_run(function, out))


if __name__ == "__main__":
    main()
