"""A generator without an engine: a process whose ranks receive broadcasts, and that can be killed
or stopped in the middle of one.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from warm_processes import warm_context

from async_rl.core.codec import decode, encode
from async_rl.core.errors import BroadcastBroken, Unavailable
from async_rl.protocol.base import Message
from async_rl.protocol.generator import LoadReport, LoadWeights
from async_rl.protocol.weights import Seat
from async_rl.weights.routes import Receivers

_FORK = warm_context()


class Generator:
    """misfortune: what happens to its process at tensor 3 of version 1: kill, stop."""

    def __init__(self, *, misfortune: str = "", devices: tuple[str, ...] = ("cpu",)) -> None:
        self.devices = list(devices)
        self.versions: list[int] = []
        self.digests: list[list[str]] = []
        self.seats: list[Seat] = []
        self.failures: list[str] = []
        self.is_asked = asyncio.Event()
        self.on_death: Callable[[], None] = list
        self._pipe, theirs = _FORK.Pipe()
        self.process = _FORK.Process(target=_serve, args=(theirs, misfortune, devices), daemon=True)
        self.process.start()
        theirs.close()
        self._pipe.recv()  # it is up, so that deadlines are about broadcasts

    async def call(self, request: Message, *, timeout_s: float) -> Message:
        assert isinstance(request, LoadWeights)
        assert isinstance(request.source, Seat)
        self.seats.append(request.source)
        self.is_asked.set()
        try:
            self._pipe.send_bytes(encode(request))
            said = await asyncio.to_thread(self._pipe.recv)
        except (EOFError, OSError) as error:
            self.on_death()
            raise Unavailable("its process ended") from error
        if isinstance(said, str):
            self.failures.append(said)
            raise BroadcastBroken(said)
        self.versions.append(request.manifest.version)
        self.digests.append(said)
        return LoadReport(version=request.manifest.version, pause_s=0.1)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


def digest(tensors: Any) -> str:
    """Of names and bytes, in order."""
    found = hashlib.sha256()
    for name, tensor in tensors:
        found.update(
            name.encode() + tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return found.hexdigest()


def _met_by(misfortune: str, tensors: Any) -> Any:
    for index, tensor in enumerate(tensors):
        if index == 3 and misfortune:
            os.kill(os.getpid(), signal.SIGKILL if misfortune == "kill" else signal.SIGSTOP)
        yield tensor


def _serve(pipe: Connection, misfortune: str, devices: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    pipe.send("up")
    # On the CPU all ranks are threads of this process; a GPU's number stands behind a colon.
    receivers = [Receivers(rank, torch.device(device)) for rank, device in enumerate(devices)]
    while True:
        request = decode(pipe.recv_bytes(), LoadWeights)
        said = [""] * len(receivers)
        errors: list[str] = []

        def receive(
            rank: int,
            request: LoadWeights = request,
            said: list[str] = said,
            errors: list[str] = errors,
        ) -> None:
            try:
                with receivers[rank].receive(request.manifest, request.source) as tensors:
                    said[rank] = digest(
                        _met_by(misfortune, tensors) if request.manifest.version == 1 else tensors
                    )
            except BroadcastBroken as error:
                errors.append(str(error))

        threads = [threading.Thread(target=receive, args=(rank,)) for rank in range(len(receivers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pipe.send(errors[0] if errors else said)
