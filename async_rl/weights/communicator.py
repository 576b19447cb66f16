"""One rank of the communicator that broadcasts weights: the rendezvous of the ranks, and two
implementations, gloo between main memories and NCCL between GPUs.

Ranks meet at the learner (weights/rendezvous.py). A broadcast that fails leaves the communicator
unusable: its owner closes it, which closes the connections, so the other ranks need not wait for
their deadlines. The listeners of gloo accept only connections that a rank announced there
(weights/gate.py). A rank compares the tensors it received with a manifest from an authenticated
call.
docs/hardware.md lists which parts have run on GPUs.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from async_rl.core.errors import AsyncRLError, BroadcastBroken
from async_rl.protocol.weights import Seat
from async_rl.weights.gate import connect_privately
from async_rl.weights.rendezvous import SeatStore

# Short against a broadcast, which takes milliseconds and more.
_POLL_S = 0.0005
# An abort takes less than a second, unless it waits for a call that hangs.
ABORT_S = 5.0


def device_name(device: torch.device) -> str:
    """`cpu`, or the UUID of the GPU: NCCL refuses two ranks on the same one."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return device.type


def join(seat: Seat, rank: int, device: torch.device) -> Communicator:
    """Return once all ranks are connected. Raises BroadcastBroken after the timeout of the seat."""
    store = SeatStore(seat)
    try:
        store.meet()
        if seat.backend == "gloo":
            return GlooCommunicator(store, seat, rank)
        return NcclCommunicator(store, seat, rank, device)
    except (RuntimeError, AsyncRLError) as error:
        # torch raises RuntimeError for ranks that do not come.
        store.close()
        raise BroadcastBroken(
            f"rank {rank} of {seat.world_size} in communicator {seat.communicator}:"
            f" {_first_line(error)}"
        ) from error


def begin(
    communicator: Communicator, flat: torch.Tensor, sender: int, *, timeout_s: float
) -> Callable[[], None]:
    """Start to send a tensor from one rank to all other ranks. flat: uint8 [N] on the
    communicator's device, read on the rank `sender` and written on the other ranks.

    Returns a function that returns once the tensor may be used, or overwritten on that rank. Both
    raise BroadcastBroken if a rank is lost or later than timeout_s; the caller then closes the
    communicator.
    """
    with _broken():
        finish = communicator.begin(flat, sender, timeout_s=timeout_s)
    return _broken()(finish)


@contextlib.contextmanager
def _broken() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise BroadcastBroken(f"a broadcast of weights failed: {_first_line(error)}") from error


def private_gloo(
    store: Any,
    rank: int,
    size: int,
    *,
    host: str,
    timeout: timedelta,
    warm_up: Callable[[Any], None] | None = None,
) -> tuple[Any, Callable[[], None]]:
    """Return a ProcessGroupGloo at this address, whose listener only its ranks can reach, and a
    function that closes its connections, below a broadcast too.

    warm_up: uses the group as it will be used later; only the ranks that it needs connect. None =
    each rank connects to all, one after another, which takes a second each (weights/gate.py).
    """
    gloo: Any = dist.ProcessGroupGloo

    def connect(device: Any) -> Any:
        options = gloo._Options()
        options._devices = [device]
        options._timeout = timeout
        group = gloo(store, rank, size, options)
        if warm_up is not None:
            warm_up(group)
        return group

    def listen() -> Any:
        return gloo.create_device(hostname=host, lazy_init=warm_up is not None)

    return connect_privately(store, size, listen=listen, connect=connect)


class GlooCommunicator:
    """TCP between main memories, bound to the address that this process has in the run."""

    device = torch.device("cpu")

    def __init__(self, store: SeatStore, seat: Seat, rank: int) -> None:
        self._store = store
        timeout = timedelta(seconds=seat.timeout_s)
        # gloo broadcasts in a tree: 4 connections per rank instead of 15 for 16 ranks.
        self._ranks: Any
        self._ranks, self._hang_up = private_gloo(
            store,
            rank,
            seat.world_size,
            host=seat.host,
            timeout=timeout,
            warm_up=lambda ranks: self._send(
                ranks, torch.zeros(1, dtype=torch.uint8), range(seat.senders), timeout
            ),
        )

    def begin(self, flat: torch.Tensor, sender: int, *, timeout_s: float) -> Callable[[], None]:
        """Return once this rank has sent or received. Raises RuntimeError if it cannot."""
        self._send(self._ranks, flat, [sender], timedelta(seconds=timeout_s))
        return lambda: None

    def cancel(self) -> None:
        """Let a broadcast fail now, from any thread. gloo itself notices a member that closes its
        connections, and not one whose machine has vanished.
        """
        self._hang_up()

    def _send(
        self, ranks: Any, flat: torch.Tensor, senders: Iterable[int], timeout: timedelta
    ) -> None:
        """Send the tensor from each of the senders. At once: to connect takes a second."""
        works = []
        try:
            for sender in senders:
                options = _options(sender)
                options.timeout = timeout
                works.append(ranks.broadcast([flat], options))
            while works:
                works.pop().wait()
        finally:
            # A stored exception refers to this frame, and would keep the connections open.
            del works, ranks

    def close(self) -> None:
        """Drop the last reference, which closes the connections, during a broadcast too."""
        self._ranks = None
        self._store.close()


class NcclCommunicator:
    """torch's process group with deadlines of this project: a deadline of torch exits the process.
    Each rank has another GPU.
    """

    def __init__(self, store: SeatStore, seat: Seat, rank: int, device: torch.device) -> None:
        """The timeout of the seat bounds the first broadcast, which connects all ranks."""
        self.device = device
        self._store = store  # NCCL connects at the first broadcast
        self._rank = rank
        self._aborting: threading.Thread | None = None
        self._one_aborts = threading.Lock()
        # Read by torch when the process group is made. 0: a lost peer is an error of the broadcast
        # instead of the end of this process.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        # The default is 30 minutes, in which nothing can stop the call: an abort waits for it.
        # torch reads it once, so the first communicator of a process decides.
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(math.ceil(seat.timeout_s)))
        choose_interface(seat.host)
        nccl: Any = dist.ProcessGroupNCCL
        # The GPU schedules the copies of a push before the kernels of a step that runs.
        options = nccl.Options(is_high_priority_stream=True)
        # Our own deadlines are shorter: at a deadline of torch the process would exit.
        options._timeout = timedelta(days=1)
        # A blocking call that waits for a lost peer could not be aborted.
        options.config.blocking = 0
        with torch.cuda.device(device):
            self._group: Any = nccl(store, rank, seat.world_size, options)

    def begin(self, flat: torch.Tensor, sender: int, *, timeout_s: float) -> Callable[[], None]:
        """Enqueue a broadcast after the work of the current stream, and return what waits for it.
        Raises RuntimeError if it cannot.
        """
        self._check()
        work = self._group.broadcast([flat], _options(sender))
        return functools.partial(self._finish, work, timeout_s)

    def _finish(self, work: Any, timeout_s: float) -> None:
        """Return once the tensor may be used, or overwritten on the sender; work enqueued on the
        current stream from now on follows the broadcast. Raises RuntimeError if it cannot.
        """
        deadline_s = time.monotonic() + timeout_s
        # Polling: NCCL signals no completion, and waiting for the stream has no deadline.
        while not work.is_completed():
            self._check()
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"rank {self._rank} waited {timeout_s:g} s")
            time.sleep(_POLL_S)
        # An abort completes the work too, with whatever had arrived.
        self._check()
        work.wait()

    def _check(self) -> None:
        if self._aborting is not None:
            raise RuntimeError(f"rank {self._rank} gave up: another rank was lost")

    def cancel(self) -> None:
        """Let `begin` and what it returned raise in the thread that uses them, and abort the
        connections (ncclCommAbort); returns immediately, in any thread.
        """
        with self._one_aborts:
            if self._aborting is None:
                # A thread of its own, which does not keep the process: abort waits for a call that
                # still connects.
                self._aborting = threading.Thread(
                    target=self._group.abort, name="abort", daemon=True
                )
                self._aborting.start()

    def close(self) -> None:
        """Abort the connections, and a broadcast that hangs; waits for at most a few seconds."""
        self.cancel()
        assert self._aborting is not None, "cancel sets it"
        # The next communicator should not share the GPU with this one.
        self._aborting.join(ABORT_S)
        self._store.close()


Communicator = GlooCommunicator | NcclCommunicator


def _options(sender: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = sender
    return options


def choose_interface(host: str) -> None:
    """Let NCCL use the network interface of an address of this machine. NCCL reads the setting once
    per process, so call this before any use of NCCL. Raises RuntimeError for a foreign address.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            # Without "=" NCCL also takes interfaces whose names start like this one (eth1, eth10).
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
            return
    raise RuntimeError(f"no network interface of this machine has the address {host}")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
