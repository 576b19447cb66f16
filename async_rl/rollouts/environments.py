"""Run the environments of agents: a process per sample for a command, which may be in a jail, or
worker processes that call a function.

takes: the endpoint and the task of a session
waits for: a free place, then the end of the environment
returns: the reward that it returned, or None
woken by: the environment; a cancelled run, whose process is killed

Raises AgentError if the environment fails. A process has at most 4 GB of memory, and exits with the
gateway. The endpoint of its session is the whole network of a jail (sandbox/agents.py).
"""

import asyncio
import contextlib
import os
import shutil
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from async_rl.config.generation import Agent
from async_rl.core.errors import AgentError
from async_rl.core.frozen import frozen
from async_rl.rollouts.agent_worker import Workers, kill_session, limit_child
from async_rl.sandbox.cell import entry, interpreter_paths
from async_rl.sandbox.namespaces import SYSTEM
from async_rl.sessions.endpoint import Endpoint, for_agent
from async_rl.sessions.open_sessions import Offers

_KEPT = ("LANG", "LC_ALL", "PATH", "TZ")
"""Variables that an agent in a jail gets from the gateway: others may be secrets."""
_CHUNK_BYTES = 1 << 16
_TAIL_BYTES = 2000
"""The end of an environment's output, in the reason of its failure."""


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


@frozen
class _Start:
    """How a command is started. descriptors: that it inherits. endpoint: as it reaches it."""

    command: Sequence[str]
    environment: Mapping[str, str]
    endpoint: Endpoint
    descriptors: Sequence[int] = ()


class Commands:
    """Starts the command once per sample."""

    def __init__(self, config: Agent) -> None:
        self._config = config
        self._slots = asyncio.Semaphore(config.workers)

    async def run(self, endpoint: Endpoint, task: dict[str, Any]) -> Any:
        """Run the command to its end."""
        plain = _Start(command=self._config.command, environment=os.environ, endpoint=endpoint)
        started: AbstractAsyncContextManager[_Start] = contextlib.nullcontext(plain)
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
                    preexec_fn=limit_child,
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
                kill_session(process.pid)
                await process.wait()
        if process.returncode:
            text = tail.decode(errors="replace")
            raise AgentError(f"the agent exited with code {process.returncode}: {text}")
        return None

    async def close(self) -> None:
        """Nothing outlives its run."""


Environments = Commands | Workers | Offers
"""Run an environment and return its result: a reward as JSON, or None."""


def open_environments(config: Agent) -> Environments:
    """Return the environments that the settings name."""
    return Commands(config) if config.fn is None else Workers(config)


@contextlib.asynccontextmanager
async def in_jail(command: Sequence[str], endpoint: Endpoint) -> AsyncIterator[_Start]:
    """Yield how the command is started in a jail; pass its connections on during the block."""
    url = urlsplit(endpoint.anthropic_base_url)
    assert url.hostname is not None
    assert url.port is not None
    # The same port, on a separate loopback.
    near = Endpoint.of(f"http://127.0.0.1:{url.port}", endpoint.api_key, endpoint.session_key)
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    taken, given = socket.socketpair()
    with taken, given:
        relaying = asyncio.create_task(
            _relay(taken, url.hostname, url.port), name="relay of a jail"
        )
        try:
            yield _Start(
                command=_arguments(command, url.port, given.fileno()),
                environment={"HOME": "/tmp", **kept},
                descriptors=[given.fileno()],
                endpoint=near,
            )
        finally:
            # Wakes the thread that waits for the listener of a process that never sent it.
            taken.shutdown(socket.SHUT_RDWR)
            relaying.cancel()
            await asyncio.gather(relaying, return_exceptions=True)


def _arguments(command: Sequence[str], port: int, descriptor: int) -> list[str]:
    """Return the command line that runs a command in a jail. Files and folders that the command
    names are shown to it. descriptor: of a socket that takes the jail's listener. Raises AgentError
    if the program does not exist.
    """
    program = shutil.which(command[0])
    if program is None:
        raise AgentError(f"rollout.fn={list(command)}: {command[0]} is not a program; correct it")
    words = [os.path.abspath(program)]
    words += [os.path.abspath(word) if os.path.exists(word) else word for word in command[1:]]
    shown = [word for word in words if os.path.exists(word)]
    environment = Path(words[0]).parent.parent
    # A virtual environment is more than its interpreter.
    if (environment / "pyvenv.cfg").exists():
        shown.append(str(environment))
    paths = {*interpreter_paths(), *shown, *map(os.path.realpath, shown)}
    readable: list[str] = []
    # A folder comes before what is in it, which is not bound again.
    for path in sorted(paths):
        if not any(Path(path).is_relative_to(above) for above in (*SYSTEM, *readable)):
            readable.append(path)
    return entry("agents", port, descriptor, readable, words)


async def _relay(taken: socket.socket, host: str, port: int) -> None:
    """Pass the connections of a jail on to this address. taken: the socket that the listener comes
    through.
    """

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(host, port)
            ways = [_copy(reader, far_writer), _copy(far_reader, writer)]
            tasks = [asyncio.ensure_future(way) for way in ways]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                far_writer.close()
        writer.close()

    # Returns without a listener when a process that failed to enter the jail is gone.
    _, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, taken, 1, 1)
    if descriptors:
        server = await asyncio.start_server(forward, sock=socket.socket(fileno=descriptors[0]))
        async with server:
            await server.serve_forever()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()


async def _tail(stream: asyncio.StreamReader | None) -> bytes:
    """Read to the end and return the end; an agent may print more than fits into memory."""
    assert stream is not None, "opened with a pipe"
    tail = b""
    while chunk := await stream.read(_CHUNK_BYTES):
        tail = (tail + chunk)[-_TAIL_BYTES:]
    return tail
