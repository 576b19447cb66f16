"""An agent's command in a jail, in which the endpoint of its session is its whole network.

takes: the listener of the jail, which is in namespaces of its own (sandbox/agents.py)
waits for: connections of the agent
returns: nothing; passes each connection on to the gateway
woken by: the agent; stops when it is cancelled, or when there is no listener
"""

import asyncio
import contextlib
import os
import shutil
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from async_rl.core.errors import AgentError
from async_rl.core.frozen import frozen
from async_rl.sandbox.cell import entry, interpreter_paths
from async_rl.sandbox.namespaces import SYSTEM
from async_rl.sessions.endpoint import Endpoint

_KEPT = ("LANG", "LC_ALL", "PATH", "TZ")
"""Variables that an agent in a jail gets from the gateway: others may be secrets."""
CHUNK_BYTES = 1 << 16


@frozen
class Start:
    """How a command is started. descriptors: that it inherits. endpoint: as it reaches it."""

    command: Sequence[str]
    environment: Mapping[str, str]
    endpoint: Endpoint
    descriptors: Sequence[int] = ()


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


@contextlib.asynccontextmanager
async def in_jail(command: Sequence[str], endpoint: Endpoint) -> AsyncIterator[Start]:
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
            yield Start(
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
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
