"""The process group of the learner's ranks: gloo between main memories, NCCL between GPUs.

Invariants
- Only ranks of the pool reach the listeners of gloo (weights/transport/gate.py). The listeners
  are at the address that the process has in the run.
- One rank that is not sharded has no process group, and so no listener. One that is sharded has
  a listener on loopback that accepts no connection.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from async_rl.weights.transport.communicator import private_gloo

BACKEND = "private_gloo"
_LOOPBACK = "127.0.0.1"
_ALONE_S = 60.0  # nothing to wait for


def join(
    store: Any, rank: int, world_size: int, *, host: str, device: torch.device, timeout_s: float
) -> None:
    """Create the default process group; returns once all ranks are connected.

    store: of torch, shared by the ranks only. host: address of this process in the run.
    """
    dist.Backend.register_backend(BACKEND, functools.partial(_gloo, host), devices=["cpu"])
    # gloo as well on GPUs: offloaded gradients and announced operations are in host memory, and
    # checkpoints gather there.
    backend = f"cpu:{BACKEND},cuda:nccl" if device.type == "cuda" else BACKEND
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )


def ensure_group_of_one(device: torch.device) -> None:
    """Create a process group of one rank, unless a group exists already."""
    if not dist.is_initialized():
        store = torch._C._distributed_c10d.HashStore()
        join(store, 0, 1, host=_LOOPBACK, device=device, timeout_s=_ALONE_S)


def _gloo(host: str, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return private_gloo(store, rank, size, host=host, timeout=timeout)
