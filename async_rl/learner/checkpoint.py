"""Checkpoints of the learner by torch.distributed.checkpoint: copied at once, written in the
background beside their place, then renamed.

Invariants
- A directory under its final name is complete and on the disk; one that ends in `.partial` is not,
  and goes when it is next in the way.
- What is restored is equal bit for bit, on any number of ranks; the random state is one, for all
  ranks make the same draws.
- The state is copied before `begin` returns; what is trained meanwhile does not reach the file. One
  checkpoint is written at a time.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.stateful import Stateful

from async_rl.core.errors import DataError, InfrastructureError
from async_rl.learner.models import Policy
from async_rl.learner.optimizer import ModelOptimizer
from async_rl.learner.sharding import Ranks

_FORMAT = 2
_CUDA_RANDOM = "random.cuda"


class Checkpointer:
    """Saves and restores models, moments, random state, version, and the state of whatever else is
    `stateful`, by name.
    """

    def __init__(
        self,
        ranks: Ranks,
        models: dict[str, tuple[nn.Module, ModelOptimizer]],
        stateful: Mapping[str, Stateful],
    ) -> None:
        self._ranks = ranks
        self._models = models
        self._stateful = stateful
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
            )
        # A group of its own: its collectives run in the background, beside those of training.
        self._group = dist.new_group(backend="gloo")

    def begin(self, directory: Path, version: int) -> Future[None]:
        """Copies the state (collective) and writes it in the background. The result, on rank 0, is
        the rename or an InfrastructureError.
        """
        partial = directory.with_name(directory.name + ".partial")
        if self._ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        self._ranks.barrier()
        state = {**self._state(), "version": torch.tensor([_FORMAT, version])}
        written: Future[Any] = async_save(state, checkpoint_id=partial, process_group=self._group)  # type: ignore[assignment]
        return self._thread.submit(self._finish, written, partial, directory)

    def _finish(self, written: Future[Any], partial: Path, directory: Path) -> None:
        try:
            written.result()
            if self._ranks.rank == 0:
                _sync_files(partial)
                os.rename(partial, directory)
                _sync(directory.parent)
        except (CheckpointException, OSError) as error:
            cause = _causes(error) if isinstance(error, CheckpointException) else str(error)
            raise InfrastructureError(
                f"checkpoint {directory} could not be written: {cause}; make room or give"
                " permission, then async-rl resume the run"
            ) from error

    def load(self, directory: Path) -> int:
        """Restores everything (collective) and returns the version. Raises DataError if there is no
        complete checkpoint.
        """
        if not (directory / ".metadata").is_file():
            raise DataError(
                f"{directory} is not a checkpoint; give a directory such as checkpoints/step_000020"
                " of a run"
            )
        state: dict[str, Any] = {**self._state(), "version": torch.zeros(2, dtype=torch.int64)}
        try:
            self._read(state, directory)
        except CheckpointException as error:
            raise DataError(
                f"checkpoint {directory} cannot be read, or is of another model or configuration:"
                f" {_causes(error)}; move it away to go on from the one before"
            ) from error
        saved_format, version = state["version"].tolist()
        if saved_format != _FORMAT:
            raise DataError(
                f"{directory} has checkpoint format {saved_format}, this version reads {_FORMAT}"
            )
        for name, (model, optimizer) in self._models.items():
            set_state_dict(
                model,
                optimizer.torch_optimizer,
                model_state_dict=state[f"{name}.model"],
                optim_state_dict=state[f"{name}.optimizer"],
            )
        for name, part in self._stateful.items():
            part.load_state_dict(state[name])
        torch.set_rng_state(state["random"])
        if _CUDA_RANDOM in state:
            torch.cuda.set_rng_state(state[_CUDA_RANDOM])
        return int(version)

    def _read(self, state: dict[str, Any], directory: Path) -> None:
        try:
            load(state, checkpoint_id=directory, process_group=self._group)
        except CheckpointException as error:
            if f"Missing key in checkpoint state_dict: {_CUDA_RANDOM}" not in _causes(error):
                raise
            del state[_CUDA_RANDOM]  # it was written on a machine without a GPU
            load(state, checkpoint_id=directory, process_group=self._group)

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "random": torch.get_rng_state(),
            **{name: part.state_dict() for name, part in self._stateful.items()},
        }
        state |= _gpu_random()
        for name, (model, optimizer) in self._models.items():
            options = StateDictOptions()
            state[f"{name}.model"], state[f"{name}.optimizer"] = get_state_dict(
                model, optimizer.torch_optimizer, options=options
            )
        return state


class ModelState:
    """A model without an optimizer, as the checkpoint's `stateful`."""

    def __init__(self, model: Policy) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """The parameters, sharded as they are."""
        return get_model_state_dict(self._model)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Puts them back."""
        set_model_state_dict(self._model, state_dict)


def _gpu_random() -> dict[str, torch.Tensor]:
    return {_CUDA_RANDOM: torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}


def _causes(error: CheckpointException) -> str:
    """What each rank ran into. (torch's exception is no Exception, and its text is a traceback.)"""
    return "; ".join(f"rank {rank}: {cause[0]!r}" for rank, cause in error.failures.items())


def _sync_files(directory: Path) -> None:
    """The files reach the disk before the name that calls them complete."""
    for path in [*directory.rglob("*"), directory]:
        _sync(path)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
