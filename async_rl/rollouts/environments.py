"""Run the environments of agents: a process per sample for a command, or worker processes that call
a function.

takes: the address, the token and the task of a session
waits for: a free place, then the end of the environment
returns: the reward that it returned, or None
woken by: the environment; a cancelled run, whose process is killed

Raises AgentError if the environment fails. A process has at most 4 GB of address space,
and exits with the gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import resource
import signal
import sys
from typing import Any, Protocol

import msgspec

from async_rl.config.rollout import Agent
from async_rl.core.errors import AgentError
from async_rl.core.os import die_with_parent
from async_rl.sessions.worker import MODEL, Done, Task

_TAIL_BYTES = 2000
"""The end of an environment's output, in the reason of its failure."""
_CHUNK_BYTES = 1 << 16
_GRACE_S = 5.0
_LINE_BYTES = 16 << 20


class Environments(Protocol):
    """Runs environments."""

    async def run(self, url: str, token: str, task: dict[str, Any]) -> Any:
        """Return the environment's result: a reward as JSON, or None. Raises AgentError."""

    async def close(self) -> None:
        """End all processes."""


def open_environments(config: Agent) -> Environments:
    """Return the environments that the settings name."""
    if config.fn is not None:
        return Workers(config)
    return Commands(config)


def variables(url: str, token: str, task: dict[str, Any]) -> dict[str, str]:
    """Return the environment variables that OpenAI's and Anthropic's packages read."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": token,
        "OPENAI_MODEL": MODEL,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": token,
        "ASYNC_RL_SESSION_URL": f"{url}/v1/session",
        "ASYNC_RL_TASK": msgspec.json.encode(task).decode(),
    }


class Commands:
    """Starts the command once per sample."""

    def __init__(self, config: Agent) -> None:
        self._config = config
        self._slots = asyncio.Semaphore(config.workers)

    async def run(self, url: str, token: str, task: dict[str, Any]) -> Any:
        """Run the command to its end."""
        async with self._slots:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._config.command,
                    env={**os.environ, **variables(url, token, task)},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=functools.partial(_limit, self._config.memory_mb),
                )
            except OSError as error:
                raise AgentError(
                    f"rollout.fn={self._config.command} cannot be started: {error}"
                ) from error
            try:
                tail = await _tail(process.stdout)
                await process.wait()
            finally:
                _kill(process)
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
        self._numbers = itertools.count()
        self._workers: list[_Worker | None] = [None] * config.workers
        self._starting = asyncio.Lock()

    async def run(self, url: str, token: str, task: dict[str, Any]) -> Any:
        """Call the function in the worker with the fewest samples."""
        number = next(self._numbers)
        worker = await self._worker()
        sent = Task(number=number, url=url, token=token, task=task)
        return await worker.run(sent)

    async def _worker(self) -> _Worker:
        async with self._starting:
            for index, worker in enumerate(self._workers):
                if worker is None or worker.is_ended:
                    self._workers[index] = started = await _Worker.start(self._config)
                    return started
            live = [worker for worker in self._workers if worker is not None]
            return min(live, key=lambda worker: worker.num_running)

    async def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            if worker is not None:
                await worker.close()


def _limit(memory_mb: int) -> None:
    """Let the new process die with the gateway, and bound its memory, before its program starts."""
    die_with_parent()
    size = memory_mb << 20
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


class _Worker:
    """One worker process and the calls that it runs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._results: dict[int, asyncio.Future[Any]] = {}
        """The calls that the function has not finished, also those that nobody waits for."""
        self._reader = asyncio.create_task(self._read(), name=f"worker {process.pid}")

    @classmethod
    async def start(cls, config: Agent) -> _Worker:
        """Start a process. Its own messages go to the gateway's log."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "async_rl.sessions.worker", str(config.fn)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES,
            start_new_session=True,
            preexec_fn=functools.partial(_limit, config.memory_mb),
        )
        return cls(process)

    @property
    def is_ended(self) -> bool:
        """Return whether the process has exited."""
        return self._reader.done()

    @property
    def num_running(self) -> int:
        """Calls in progress."""
        return len(self._results)

    async def run(self, task: Task) -> Any:
        """Return the value of the function."""
        loop = asyncio.get_running_loop()
        result = self._results[task.number] = loop.create_future()
        stdin = self._process.stdin
        assert stdin is not None, "opened with a pipe"
        try:
            stdin.write(msgspec.json.encode(task) + b"\n")
            with contextlib.suppress(ConnectionError):
                await stdin.drain()
            return await result
        except asyncio.CancelledError:
            # Time for the function to notice that its session is closed.
            loop.call_later(_GRACE_S, self._kill_if_running, task.number)
            raise

    def _kill_if_running(self, number: int) -> None:
        if number in self._results:
            _kill(self._process)

    async def _read(self) -> None:
        reason = ""
        try:
            await self._take_results()
        except (msgspec.DecodeError, ValueError) as error:
            # Nothing reads the process's output any more, so its calls would wait for ever.
            reason = f", which wrote a line that is not a result ({error}),"
            _kill(self._process)
        code = await self._process.wait()
        for result in self._results.values():
            if not result.done():
                result.set_exception(
                    AgentError(
                        f"the environment's worker{reason} ended with code {code} (-9: killed, for"
                        " example for memory or because a call did not end)"
                    )
                )

    async def _take_results(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None, "opened with a pipe"
        while line := await stdout.readline():
            done = msgspec.json.decode(line, type=Done)
            result = self._results.pop(done.number)
            # The group was given up, because another sample failed or its time is over.
            if result.done():
                continue
            if done.error:
                result.set_exception(AgentError(done.error))
            else:
                result.set_result(done.value)

    async def close(self) -> None:
        """End the process."""
        _kill(self._process)
        await self._reader


async def _tail(stream: asyncio.StreamReader | None) -> bytes:
    """Read to the end and return the end; an agent may print more than fits into memory."""
    assert stream is not None, "opened with a pipe"
    tail = b""
    while chunk := await stream.read(_CHUNK_BYTES):
        tail = (tail + chunk)[-_TAIL_BYTES:]
    return tail


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill the process and the processes that it started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
