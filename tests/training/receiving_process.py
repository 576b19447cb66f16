"""A generator without an engine, whose ranks receive broadcasts: a thread, with GPUs a process."""

import asyncio
import hashlib
import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch
from warm_processes import WarmProcess, warm_context

from async_rl.core.codec import decode, encode
from async_rl.core.errors import BroadcastBroken, Unavailable
from async_rl.protocol.base import Message
from async_rl.protocol.generator import LoadReport, LoadWeights
from async_rl.protocol.weights import Seat
from async_rl.weights.receiving import Receivers


class Generator:
    """misfortune: what happens at tensor 3 of version 1: "dies", which closes its connections as
    the kernel does, "hangs", or "vanishes": hangs, and the directory knows that it has left.
    """

    def __init__(self, *, misfortune: str = "", devices: tuple[str, ...] = ("cpu",)) -> None:
        self.devices = list(devices)
        self.versions: list[int] = []
        self.digests: list[list[str]] = []
        self.seats: list[Seat] = []
        self.failures: list[str] = []
        self.is_asked = asyncio.Event()
        self.on_death: Callable[[], None] = list
        self._is_over = threading.Event()
        self._pipe, theirs = multiprocessing.Pipe()
        self._process: WarmProcess | None = None
        if devices[0] == "cpu":
            work = (theirs, devices, self._met_by(misfortune))
            threading.Thread(target=_serve, args=work, daemon=True).start()
        else:
            self._process = warm_context().Process(
                target=_serve, args=(theirs, devices), daemon=True
            )
            self._process.start()
            theirs.close()
        self._pipe.recv()  # it is up, so that deadlines are about broadcasts

    def _met_by(self, misfortune: str) -> Callable[[], None]:
        def meet() -> None:
            if misfortune == "vanishes":
                self._loop.call_soon_threadsafe(self.on_death)
            if misfortune in ("hangs", "vanishes"):
                self._is_over.wait()
            if misfortune:
                raise EOFError

        return meet

    async def call(self, request: Message, *, timeout_s: float) -> Message:
        assert isinstance(request, LoadWeights)
        assert isinstance(request.source, Seat)
        self.seats.append(request.source)
        self.is_asked.set()
        self._loop = asyncio.get_running_loop()
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
        self._is_over.set()
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._pipe.close()


def digest(tensors: Any) -> str:
    """Of names and bytes, in order."""
    found = hashlib.sha256()
    for name, tensor in tensors:
        found.update(
            name.encode() + tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return found.hexdigest()


def _serve(
    pipe: Connection, devices: tuple[str, ...], meet: Callable[[], None] = lambda: None
) -> None:
    pipe.send("up")
    # On the CPU all ranks are threads; a GPU's number stands behind a colon.
    receivers = [Receivers(rank, torch.device(device)) for rank, device in enumerate(devices)]

    def received(receiver: Receivers, request: LoadWeights) -> str | Exception:
        try:
            with receiver.receive(request.manifest, request.source) as tensors:
                return digest(_until_misfortune(tensors, request.manifest.version, meet))
        except (BroadcastBroken, EOFError) as error:
            return error

    with pipe, ThreadPoolExecutor(len(receivers)) as ranks:
        while True:
            try:
                request = decode(pipe.recv_bytes(), LoadWeights)
            except (EOFError, OSError):
                break
            said = list(ranks.map(received, receivers, [request] * len(receivers)))
            errors = [each for each in said if isinstance(each, Exception)]
            if any(isinstance(error, EOFError) for error in errors):
                break
            pipe.send(str(errors[0]) if errors else said)
    for receiver in receivers:
        receiver.close()


def _until_misfortune(tensors: Any, version: int, meet: Callable[[], None]) -> Any:
    for index, tensor in enumerate(tensors):
        if (version, index) == (1, 3):
            meet()
        yield tensor
