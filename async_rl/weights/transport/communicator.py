"""One rank of a communicator in which the learner broadcasts weights: the rendezvous of the ranks,
and the implementation over gloo.

Ranks meet through a TCPStore that the learner opens at its address in the run. A broadcast that
ends early leaves the communicator unusable: its owner closes it, which ends the connections, so the
other ranks need not wait for their deadlines. The listeners of gloo accept only connections that a
rank announced in the store (weights/transport/gate.py). The store itself is not authenticated; a
rank compares the tensors it received with a manifest from an authenticated call.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from async_rl.core.errors import BroadcastBroken
from async_rl.protocol.weights import Seat
from async_rl.weights.transport.gate import connect_privately

_PRESENT, _VERDICT, _ALL, _LOST = "present", "verdict", "all", "lost"


class Communicator(Protocol):
    """Broadcasts of rank 0 to all others."""

    @property
    def device(self) -> torch.device:
        """The device of the tensors to send or receive."""

    def broadcast(self, flat: torch.Tensor, *, timeout_s: float) -> None:
        """uint8 [N] on `device`: read on rank 0, written on the others. Raises RuntimeError if a
        rank is lost or too late.
        """

    def close(self) -> None:
        """End the connections, during a broadcast too."""


def device_name(device: torch.device) -> str:
    """`cpu`, or the UUID of the GPU: NCCL refuses two ranks on the same one."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return device.type


def open_store(host: str) -> dist.TCPStore:  # type: ignore[name-defined]
    """Open a store at a free port of this address only."""
    # torch would listen on all addresses of the machine.
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def join(seat: Seat, rank: int, device: torch.device) -> Communicator:
    """Return once all ranks are connected. Raises BroadcastBroken after the timeout of the seat."""
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
    except RuntimeError as error:
        # torch raises it for a store that is gone and for ranks that do not come.
        raise BroadcastBroken(
            f"rank {rank} of {seat.world_size} in communicator {seat.communicator}:"
            f" {_first_line(error)}"
        ) from error


def _meet(store: Any, world_size: int) -> None:
    """Wait until all ranks are alive.

    Connecting afterwards cannot be called off, and has no deadline with NCCL.
    """
    if store.add(_PRESENT, 1) == world_size:
        # The first verdict stays: a rank that connects would wait for one that read another.
        store.compare_set(_VERDICT, "", _ALL)
    if store.get(_VERDICT).decode() != _ALL:
        raise RuntimeError("the load was cancelled because a member was lost")


def call_off(store: Any, communicator: str) -> None:
    """Let all ranks give up that wait in `join` for this communicator, now or later, unless all
    have met: then they connect.
    """
    ranks = dist.PrefixStore(communicator, store)  # type: ignore[attr-defined]
    ranks.compare_set(_VERDICT, "", _LOST)


def broadcast(communicator: Communicator, flat: torch.Tensor, *, timeout_s: float) -> None:
    """As Communicator.broadcast. After BroadcastBroken the caller closes the communicator."""
    try:
        communicator.broadcast(flat, timeout_s=max(timeout_s, 0.001))
    except RuntimeError as error:
        raise BroadcastBroken(
            f"a broadcast of weights ended early: {_first_line(error)}"
        ) from error


def private_gloo(store: Any, rank: int, size: int, *, host: str, timeout: timedelta) -> Any:
    """Return a ProcessGroupGloo at this address, whose listener only its ranks can reach."""
    gloo: Any = dist.ProcessGroupGloo

    def connect(device: Any) -> Any:
        options = gloo._Options()
        options._devices = [device]
        options._timeout = timeout
        return gloo(store, rank, size, options)

    def listen() -> Any:
        return gloo.create_device(hostname=host)

    return connect_privately(store, rank, size, listen=listen, connect=connect)


class GlooCommunicator:
    """TCP between main memories, bound to the address that this process has in the run."""

    device = torch.device("cpu")

    def __init__(
        self, store: Any, rank: int, world_size: int, *, host: str, timeout: timedelta
    ) -> None:
        self._ranks: Any = private_gloo(store, rank, world_size, host=host, timeout=timeout)

    def broadcast(self, flat: torch.Tensor, *, timeout_s: float) -> None:
        """Return once this rank has sent or received."""
        work = self._ranks.broadcast([flat], _from_rank_0(timeout_s))
        try:
            work.wait()
        finally:
            # A stored exception refers to this frame, and would keep the connections open.
            del work

    def close(self) -> None:
        """Drop the last reference, which closes the connections."""
        self._ranks = None


def _from_rank_0(timeout_s: float) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.timeout = timedelta(seconds=timeout_s)
    return options


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
