"""The implementation over NCCL: each rank has another GPU.

docs/hardware.md lists which parts have run on GPUs.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

# Short against a broadcast, which takes milliseconds and more.
_POLL_S = 0.0005
# Our own deadlines are below: when one of torch passes, it ends the process.
_NEVER = timedelta(days=1)


def choose_interface(host: str) -> None:
    """Let NCCL use the network interface of an address of this machine. NCCL reads the setting once
    per process, so this comes before its first use, by whomever.
    """
    # Without "=" NCCL also takes interfaces whose names start like this one (eth1, eth10).
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "=" + _interface_of(host))


class NcclCommunicator:
    """torch's process group with our own deadlines: a timeout of torch ends the process."""

    def __init__(
        self, store: Any, rank: int, world_size: int, *, host: str, device: torch.device
    ) -> None:
        self.device = device
        self._rank = rank
        # Read by torch when the process group is made. 0: a lost peer is an error of the broadcast
        # instead of the end of this process.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        choose_interface(host)
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = _NEVER
        # A blocking call that waits for a lost peer could not be aborted.
        options.config.blocking = 0
        with torch.cuda.device(device):
            self._group: Any = nccl(store, rank, world_size, options)

    def broadcast(self, flat: torch.Tensor, *, timeout_s: float) -> None:
        """Return once the tensor may be used, or overwritten on rank 0."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        deadline_s = time.monotonic() + timeout_s
        work = self._group.broadcast([flat], options)
        # Polling: NCCL signals no completion, and waiting for the stream has no deadline.
        while not work.is_completed():
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"rank {self._rank} waited {timeout_s:g} s")
            time.sleep(_POLL_S)
        work.wait()

    def close(self) -> None:
        """Abort: also ends a broadcast that hangs (ncclCommAbort)."""
        self._group.abort()


def _interface_of(host: str) -> str:
    """Name of the interface that has this address; NCCL accepts only names."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return str(name)
    raise RuntimeError(f"no network interface of this machine has the address {host}")
