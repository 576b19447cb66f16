"""Build the trainer of one learner rank: its device, its process group, its models."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from async_rl.core.errors import ConfigError
from async_rl.learner import sharding
from async_rl.learner.trainer import Trainer
from async_rl.runtime.context import RENDEZVOUS_FILE, ProcessContext
from async_rl.weights.communicator import choose_interface

_ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}
"""Where a user sets torch's allocator, which reads it at its first use."""


def learner_device(gpus: float) -> torch.device:
    """Return the device of a rank: the one GPU assigned to it, which it sees as the first, or the
    CPU. Raises ConfigError if torch cannot use GPUs.
    """
    if gpus == 0:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"learner.gpus_each={gpus:g} but torch {torch.__version__} finds no CUDA GPU here:"
            " install its CUDA build (pip install .[gpu]), repair the driver (nvidia-smi), or set"
            " learner.gpus_each=0"
        )
    return torch.device("cuda", 0)


def build_trainer(context: ProcessContext, device: torch.device) -> Trainer:
    """Join the other ranks and build this rank's trainer; blocks."""
    config = context.config
    # The number of threads is OMP_NUM_THREADS, which the launcher sets to this rank's cores.
    if device.type == "cuda":
        # FSDP's groups are the first that use NCCL in this process, not those of weight pushes.
        choose_interface(context.host)
        if not _ALLOCATOR & os.environ.keys():
            # The plan counts on small gaps (planning/estimate.py), and page-locked memory that is
            # not rounded up to a power of two. Such segments cannot be mapped by a process that is
            # no child.
            is_mapped = config.weights.transfer.kind == "ipc"
            os.environ["PYTORCH_CUDA_ALLOC_CONF"] = (
                f"expandable_segments:{not is_mapped},pinned_max_round_threshold_mb:1"
            )
    world_size = config.learner.ranks
    if world_size > 1:
        # Bounds one collective; between operations the ranks wait without one.
        timeout_s = 2 * config.timeouts.take_s
        # Through a file of the run, to which only its processes have access.
        path = str(context.run_dir / RENDEZVOUS_FILE)
        store = dist.FileStore(path, world_size)  # type: ignore[attr-defined]
        sharding.join(
            store,
            context.rank,
            world_size,
            host=context.host,
            device=device,
            timeout_s=timeout_s,
        )
    return Trainer(
        config,
        context.model_path,
        rank=context.rank,
        world_size=world_size,
        device=device,
        failed_batches=context.run_dir / "failed_batches",
    )
