"""Run the environments of agents: a process per sample for a command, or worker processes that call
a function.

takes: the endpoint and the task of a session
waits for: a free place, then the end of the environment
returns: the reward that it returned, or None
woken by: the environment; a cancelled run, whose process is killed

Raises AgentError if the environment fails. A process has at most 4 GB of memory, and
exits with the gateway.
"""

import asyncio
import contextlib
import functools
import os
import resource
import signal
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec

from async_rl.config.generation import Agent
from async_rl.core.errors import AgentError
from async_rl.core.os import die_with_parent
from async_rl.rewards.child_process import ChildEnded, ChildProcess
from async_rl.rollouts.agent_worker import Done, Task
from async_rl.rollouts.jailed import CHUNK_BYTES, Start, in_jail
from async_rl.sessions.endpoint import Endpoint, for_agent
from async_rl.sessions.offers import Offers

_TAIL_BYTES = 2000
"""The end of an environment's output, in the reason of its failure."""
_MEMORY_MB = 4096
"""Private memory that can be written. Python with an SDK uses about 100 MB, node 200 MB."""
GRACE_S = 5.0


def variables(endpoint: Endpoint, task: dict[str, Any]) -> dict[str, str]:
    """Return the environment variables that OpenAI's and Anthropic's packages read. A command is
    the agent, so they have neither the session's key nor the secrets of the task.
    """
    return {
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "OPENAI_MODEL": endpoint.model,
        "ANTHROPIC_BASE_URL": endpoint.anthropic_base_url,
        "ANTHROPIC_API_KEY": endpoint.api_key,
        "ASYNC_RL_SESSION_URL": endpoint.session_url,
        "ASYNC_RL_TASK": msgspec.json.encode(for_agent(task)).decode(),
    }


class Commands:
    """Starts the command once per sample."""

    def __init__(self, config: Agent) -> None:
        self._config = config
        self._slots = asyncio.Semaphore(config.workers)

    async def run(self, endpoint: Endpoint, task: dict[str, Any]) -> Any:
        """Run the command to its end."""
        plain = Start(command=self._config.command, environment=os.environ, endpoint=endpoint)
        started: AbstractAsyncContextManager[Start] = contextlib.nullcontext(plain)
        if self._config.is_jailed:
            started = in_jail(self._config.command, endpoint)
        async with self._slots, started as start:
            try:
                process = await asyncio.create_subprocess_exec(
                    *start.command,
                    env={**start.environment, **variables(start.endpoint, task)},
                    pass_fds=start.descriptors,
                    # An agent that reads its input fails, instead of waiting for its time limit.
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_limit,
                )
            except OSError as error:
                raise AgentError(
                    f"rollout.fn={self._config.command} cannot be started: {error}"
                ) from error
            try:
                # Read to the end: a full pipe would stop the agent.
                tail = await _tail(process.stdout)
                await process.wait()
            finally:
                # Also if the agent has exited: its children would call a closed session.
                _kill(process.pid)
                await process.wait()
        if process.returncode:
            text = tail.decode(errors="replace")
            raise AgentError(f"the agent exited with code {process.returncode}: {text}")
        return None

    async def close(self) -> None:
        """Nothing outlives its run."""


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
            _kill(worker.pid)

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
                    preexec_fn=_limit,
                )
                self._workers.append(started)
                self._running[started] = set()
                return started
            return min(self._workers, key=lambda worker: len(self._running[worker]))

    async def close(self) -> None:
        """Kill the workers and the processes that they started."""
        for worker in list(self._running):
            if not worker.has_ended:
                _kill(worker.pid)
                await worker.kill()


Environments = Commands | Workers | Offers
"""Run an environment and return its result: a reward as JSON, or None."""


def open_environments(config: Agent) -> Environments:
    """Return the environments that the settings name."""
    return Commands(config) if config.fn is None else Workers(config)


async def _answer(worker: ChildProcess[Done], task: Task) -> Done:
    try:
        return await worker.ask(task)
    except ChildEnded as ended:
        # Programs that it started would call sessions that are closed.
        _kill(worker.pid)
        return Done(
            error=f"the environment's worker exited with code {ended.code} (-9: killed, for"
            " example for memory or because a call did not end)"
        )


def _limit() -> None:
    """Let the new process die with the gateway, and bound its memory, before its program starts."""
    die_with_parent()
    # Pages that it may write: Linux does not limit the resident memory of one process, and node
    # reserves far more address space than it uses (8 GB for each WebAssembly memory).
    size = _MEMORY_MB << 20
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))


async def _tail(stream: asyncio.StreamReader | None) -> bytes:
    """Read to the end and return the end; an agent may print more than fits into memory."""
    assert stream is not None, "opened with a pipe"
    tail = b""
    while chunk := await stream.read(CHUNK_BYTES):
        tail = (tail + chunk)[-_TAIL_BYTES:]
    return tail


def _kill(pid: int) -> None:
    """Kill the process and the processes that it started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
