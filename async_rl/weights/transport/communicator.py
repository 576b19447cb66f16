"""One rank of a communicator in which the learner broadcasts weights: how ranks meet, and the form
over gloo.

Ranks meet through a TCPStore that the learner opens at its address in the run.  Whatever ends a
broadcast before its end leaves the
communicator useless: its owner closes it, which ends the connections, so that the others need not
wait for their deadlines. Neither the store nor the connections are authenticated; what a rank
received is compared with a manifest that came over an authenticated call.  Used by the learner
(`weights/transport/broadcast.py`) and by generators (`weights/receiver.py`).
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from async_rl.core.errors import GroupBroken
from async_rl.protocol.weights import Seat

_PRESENT, _VERDICT, _ALL, _LOST = "present", "verdict", "all", "lost"


class Communicator(Protocol):
    """Broadcasts of rank 0 to all others."""

    @property
    def device(self) -> torch.device:
        """Where tensors have to be."""

    def broadcast(self, flat: torch.Tensor, *, timeout_s: float) -> None:
        """uint8 [N] on `device`: read on rank 0, written on the others. Raises RuntimeError if
        somebody is lost or too late.
        """

    def close(self) -> None:
        """Ends the connections, whatever is under way."""


def device_name(device: torch.device) -> str:
    """`cpu`, or the UUID of the GPU: two ranks with the same one cannot share a communicator over
    NCCL.
    """
    return (
        str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type
    )


def open_store(host: str) -> dist.TCPStore:  # type: ignore[name-defined]
    """A store at a free port of this address and no other."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def join(seat: Seat, rank: int, device: torch.device) -> Communicator:
    """Returns once all ranks are there. Raises GroupBroken if they are not within the seat's time."""
    host, _, port = seat.store.rpartition(":")
    timeout = timedelta(seconds=seat.timeout_s)
    try:
        client = dist.TCPStore(  # type: ignore[attr-defined]
            host, int(port), is_master=False, wait_for_workers=False, timeout=timeout
        )
        store = dist.PrefixStore(seat.communicator, client)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        _meet(store, seat.world_size)
        if seat.backend == "gloo":
            return GlooCommunicator(store, rank, seat.world_size, host=seat.host, timeout=timeout)
        from async_rl.weights.transport.communicator_nccl import NcclCommunicator

        return NcclCommunicator(store, rank, seat.world_size, host=seat.host, device=device)
    except (
        RuntimeError
    ) as error:  # what torch raises for a store that is gone, and for ranks that do not come
        raise GroupBroken(
            f"rank {rank} of {seat.world_size} in communicator {seat.communicator}:"
            f" {_first_line(error)}"
        ) from error


def _meet(store: Any, world_size: int) -> None:
    """All ranks are alive before any connects to another, which can be called off by nobody, and
    with NCCL has no deadline.
    """
    if store.add(_PRESENT, 1) == world_size:
        store.set(_VERDICT, _ALL)
    if store.get(_VERDICT).decode() != _ALL:
        raise RuntimeError("it was called off, because a member was lost")


def call_off(store: Any, communicator: str) -> None:
    """Whoever waits in `join` for all ranks of this communicator, or begins to, gives up."""
    dist.PrefixStore(communicator, store).set(_VERDICT, _LOST)  # type: ignore[attr-defined]


def broadcast(communicator: Communicator, flat: torch.Tensor, *, timeout_s: float) -> None:
    """As Communicator.broadcast. Raises GroupBroken, after which the communicator is to be closed."""
    try:
        communicator.broadcast(flat, timeout_s=max(timeout_s, 0.001))
    except RuntimeError as error:
        raise GroupBroken(
            f"a broadcast of weights did not come to its end: {_first_line(error)}"
        ) from error


class GlooCommunicator:
    """Over TCP between main memories; bound to the address that this process has in the run."""

    device = torch.device("cpu")

    def __init__(
        self, store: Any, rank: int, world_size: int, *, host: str, timeout: timedelta
    ) -> None:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = timeout
        self._group: Any = gloo(store, rank, world_size, options)

    def broadcast(self, flat: torch.Tensor, *, timeout_s: float) -> None:
        """Returns once this rank has sent or received."""
        work = self._group.broadcast([flat], _from_rank_0(timeout_s))
        try:
            work.wait()
        finally:
            del work  # an error that is kept would keep the connections open through it

    def close(self) -> None:
        """The last reference closes the connections."""
        self._group = None


def _from_rank_0(timeout_s: float) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    options.timeout = timedelta(seconds=timeout_s)
    return options


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
