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
import collections
import contextlib
import functools
import os
import resource
import signal
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import msgspec

from async_rl.config.rollout import Agent
from async_rl.core.errors import AgentError
from async_rl.core.os import die_with_parent
from async_rl.rewards.child_process import ChildEnded, ChildProcess
from async_rl.rollouts.agent_worker import Done, Task
from async_rl.rollouts.jailed import Start, in_jail
from async_rl.sessions.endpoint import Endpoint, for_agent

_TAIL_BYTES = 2000
"""The end of an environment's output, in the reason of its failure."""
_CHUNK_BYTES = 1 << 16
_MEMORY_MB = 4096
"""Private memory that can be written. Python with an SDK uses about 100 MB, node 200 MB."""
_GRACE_S = 5.0


class Environments(Protocol):
    """Runs environments."""

    async def run(self, endpoint: Endpoint, task: dict[str, Any]) -> Any:
        """Return the environment's result: a reward as JSON, or None. Raises AgentError."""

    async def close(self) -> None:
        """End all processes."""


def open_environments(config: Agent) -> Environments:
    """Return the environments that the settings name."""
    if config.fn is not None:
        return Workers(config)
    return Commands(config)


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
        plain = Start(
            command=self._config.command, environment=os.environ, descriptors=(), endpoint=endpoint
        )
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
    """Processes that call the function, each for many samples at the same time."""

    def __init__(self, config: Agent) -> None:
        self._config = config
        self._workers: list[ChildProcess[Done] | None] = [None] * config.workers
        self._num_running = collections.Counter[ChildProcess[Done]]()
        self._starting = asyncio.Lock()

    async def run(self, endpoint: Endpoint, task: dict[str, Any]) -> Any:
        """Call the function in the worker with the fewest samples."""
        worker = await self._worker()
        asking = asyncio.create_task(worker.ask(Task(endpoint=endpoint, task=task)))
        # Counted at once: the next sample is placed before this call is sent.
        self._num_running[worker] += 1
        asking.add_done_callback(functools.partial(self._finished, worker))
        try:
            done = await asyncio.shield(asking)
        except ChildEnded as ended:
            raise AgentError(
                f"the environment's worker exited with code {ended.code} (-9: killed, for example"
                " for memory or because a call did not end)"
            ) from ended
        except asyncio.CancelledError:
            # Time for the function to notice that its session is closed.
            loop = asyncio.get_running_loop()
            loop.call_later(_GRACE_S, self._kill_if_running, worker, asking)
            raise
        if done.error:
            raise AgentError(done.error)
        return msgspec.json.decode(done.value)

    def _finished(self, worker: ChildProcess[Done], asking: asyncio.Task[Done]) -> None:
        self._num_running[worker] -= 1
        # Nobody else looks at the failure of a call that was cancelled.
        if not asking.cancelled():
            asking.exception()

    def _kill_if_running(self, worker: ChildProcess[Done], asking: asyncio.Task[Done]) -> None:
        if not asking.done():
            _kill(worker.pid)

    async def _worker(self) -> ChildProcess[Done]:
        # One start at a time: two samples would start two workers in one place.
        async with self._starting:
            for index, worker in enumerate(self._workers):
                if worker is None or worker.has_ended:
                    started = await ChildProcess.start(
                        "async_rl.rollouts.agent_worker",
                        Done,
                        str(self._config.fn),
                        start_new_session=True,
                        preexec_fn=_limit,
                    )
                    self._workers[index] = started
                    return started
            live = [worker for worker in self._workers if worker is not None]
            return min(live, key=lambda worker: self._num_running[worker])

    async def close(self) -> None:
        """Kill the workers and the processes that they started."""
        for worker in self._workers:
            if worker is not None:
                _kill(worker.pid)
                await worker.kill()


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
    while chunk := await stream.read(_CHUNK_BYTES):
        tail = (tail + chunk)[-_TAIL_BYTES:]
    return tail


def _kill(pid: int) -> None:
    """Kill the process and the processes that it started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
