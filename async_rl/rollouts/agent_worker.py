"""Worker processes that call an agent's function, each for many samples at the same time.

`python -m async_rl.rollouts.agent_worker module:function` is one of them: it takes tasks over the
pipes of rewards/child_process.py and returns a result per task. Async functions run as tasks,
others in threads. The end of the pipe stops the process.
"""

import asyncio
import contextlib
import functools
import inspect
import os
import resource
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from async_rl.config.generation import Agent
from async_rl.config.plugins import AGENT, load_function
from async_rl.core.errors import AgentError
from async_rl.core.frozen import Value
from async_rl.core.os import die_with_parent
from async_rl.rewards.child_process import ChildEnded, ChildProcess, ParentPipes
from async_rl.sessions.endpoint import Endpoint

GRACE_S = 5.0
_MEMORY_MB = 4096
"""Private memory that can be written. Python with an SDK uses about 100 MB, node 200 MB."""
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


class Workers:
    """Processes that call the function, each for many samples at the same time.

    A call that hangs cannot be ended without its process: no other one starts there, and the
    process is killed when its other calls have returned.
    """

    def __init__(self, config: Agent) -> None:
        self._config = config
        self._workers: list[ChildProcess[Done]] = []
        """Those that take samples."""
        self._running: dict[ChildProcess[Done], set[asyncio.Task[Done]]] = {}
        self._starting = asyncio.Lock()

    async def run(self, endpoint: Endpoint, task: dict[str, Any]) -> Any:
        """Call the function in the worker with the fewest samples."""
        worker = await self._worker()
        asking = asyncio.create_task(_answer(worker, Task(endpoint=endpoint, task=task)))
        # Counted now: the next sample is placed before this call is sent.
        self._running[worker].add(asking)
        asking.add_done_callback(functools.partial(self._left, worker))
        try:
            done = await asyncio.shield(asking)
        except asyncio.CancelledError:
            # Time for the function to notice that its session is closed.
            asyncio.get_running_loop().call_later(GRACE_S, self._give_up, worker, asking)
            raise
        if done.error:
            raise AgentError(done.error)
        return msgspec.json.decode(done.value)

    def _left(self, worker: ChildProcess[Done], asking: asyncio.Task[Done]) -> None:
        running = self._running.get(worker, set())
        running.discard(asking)
        if running or (worker in self._workers and not worker.has_ended):
            return
        self._running.pop(worker, None)
        if not worker.has_ended:
            kill_session(worker.pid)

    def _give_up(self, worker: ChildProcess[Done], asking: asyncio.Task[Done]) -> None:
        if not asking.done():
            self._workers = [each for each in self._workers if each is not worker]
            self._left(worker, asking)

    async def _worker(self) -> ChildProcess[Done]:
        # One start at a time: two samples would start two workers in one place.
        async with self._starting:
            self._workers = [worker for worker in self._workers if not worker.has_ended]
            if len(self._workers) < self._config.workers:
                started = await ChildProcess.start(
                    "async_rl.rollouts.agent_worker",
                    Done,
                    str(self._config.fn),
                    start_new_session=True,
                    preexec_fn=limit_child,
                )
                self._workers.append(started)
                self._running[started] = set()
                return started
            return min(self._workers, key=lambda worker: len(self._running[worker]))

    async def close(self) -> None:
        """Kill the workers and the processes that they started."""
        for worker in list(self._running):
            if not worker.has_ended:
                kill_session(worker.pid)
                await worker.kill()


async def _answer(worker: ChildProcess[Done], task: Task) -> Done:
    try:
        return await worker.ask(task)
    except ChildEnded as ended:
        # Programs that it started would call sessions that are closed.
        kill_session(worker.pid)
        return Done(
            error=f"the environment's worker exited with code {ended.code} (-9: killed, for"
            " example for memory or because a call did not end)"
        )


def limit_child() -> None:
    """Let the new process die with the gateway, and bound its memory, before its program starts."""
    die_with_parent()
    # Pages that it may write: Linux does not limit the resident memory of one process, and node
    # reserves far more address space than it uses (8 GB for each WebAssembly memory).
    size = _MEMORY_MB << 20
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def kill_session(pid: int) -> None:
    """Kill the process and the processes that it started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


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
