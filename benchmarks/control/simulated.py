"""The common part of the benchmarks with simulated members: one service of the product in a
separate process, and many clients in this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from async_rl.protocol.base import Message
from async_rl.wire.rpc import Handler, RpcClient, RpcServer, create_keys, load_keys

_ADDRESS_FILE = "address"


async def serve_until_terminated(
    directory: Path,
    handlers: Mapping[type[Message], Handler],
    *background: Coroutine[Any, Any, None],
    gather_s: float = 0.0,
) -> None:
    """Answer messages during the background work until SIGTERM; `service` waits for the address."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    with RpcServer("127.0.0.1", 0, load_keys(directory), handlers, gather_s=gather_s) as server:
        tasks = [asyncio.create_task(work) for work in (server.serve(), *background)]
        (directory / _ADDRESS_FILE).write_text(server.address)
        await stopping.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def service(module: str, directory: Path, *words: str) -> Iterator[psutil.Process]:
    """Start `module --serve directory *words` and yield its process once it serves; end it with the
    block.
    """
    create_keys(directory)
    address = directory / _ADDRESS_FILE
    command = [sys.executable, "-m", module, "--serve", str(directory), *words]
    with subprocess.Popen(command) as process:
        try:
            while not address.exists() or not address.read_text():
                assert process.poll() is None
                time.sleep(0.05)
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait()


class Clients:
    """The simulated members: connections to the service of this directory."""

    def __init__(self, directory: Path) -> None:
        self._address = (directory / _ADDRESS_FILE).read_text()
        self._keys = load_keys(directory)

    def connect(self) -> RpcClient:
        """Return a connection, to be opened with `async with`."""
        return RpcClient(self._address, self._keys)

    async def end(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Cancel the members and close all connections. Raises RuntimeError if a member has exited
        early.
        """
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(outcome, asyncio.CancelledError):
                cause = outcome if isinstance(outcome, BaseException) else None
                raise RuntimeError("a simulated member exited early") from cause


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds of the process so far."""
    return sum(process.cpu_times()[:2])
