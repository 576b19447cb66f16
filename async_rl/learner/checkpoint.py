"""Checkpoints of the learner by torch.distributed.checkpoint: written beside their place, then switched in by a rename.

Invariants
- A directory under its final name is complete; one that ends in `.partial` is not and is removed when it is next in the way.
- What is restored is equal bit for bit, on any number of ranks but for the random states of ranks that did not exist.
"""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from async_rl.errors import DataError
from async_rl.learner.models import Critic, Policy
from async_rl.learner.optimizer import ModelOptimizer
from async_rl.learner.sharding import Ranks

_FORMAT = 1


class Checkpointer:
    """Saves and restores models, moments, random state and version."""

    def __init__(self, ranks: Ranks, models: dict[str, tuple[Policy | Critic, ModelOptimizer]]) -> None:
        self._ranks = ranks
        self._models = models

    def save(self, directory: Path, version: int) -> None:
        """Writes the checkpoint (collective). Raises OSError, leaving what stood there, if it cannot be written."""
        partial = directory.with_name(directory.name + ".partial")
        if self._ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        self._ranks.barrier()
        state = {**self._models_state(), "version": torch.tensor([_FORMAT, version]), **self._random_state()}
        try:
            with _quiet():
                save(state, checkpoint_id=partial, no_dist=self._ranks.world_size == 1)
        except CheckpointException as error:
            raise OSError(f"checkpoint {directory} could not be written: {_causes(error)}") from error
        if self._ranks.rank == 0:
            if directory.exists():
                shutil.rmtree(directory)
            os.rename(partial, directory)
            _sync(directory.parent)
        self._ranks.barrier()

    def load(self, directory: Path) -> int:
        """Restores everything (collective) and returns the version. Raises DataError if there is no complete checkpoint."""
        if not (directory / ".metadata").is_file():
            raise DataError(f"{directory} is not a checkpoint; give a directory such as checkpoints/step_000020 of a run")
        state: dict[str, Any] = {**self._models_state(), "version": torch.zeros(2, dtype=torch.int64), **self._random_state()}
        try:
            with _quiet():
                load(state, checkpoint_id=directory, no_dist=self._ranks.world_size == 1)
        except CheckpointException as error:
            raise DataError(f"checkpoint {directory} cannot be read, or is of another model or configuration: {_causes(error)}") from error
        for name, (model, optimizer) in self._models.items():
            set_state_dict(
                model,
                optimizer.torch_optimizer,
                model_state_dict=state[f"{name}.model"],
                optim_state_dict=state[f"{name}.optimizer"],
            )
        torch.set_rng_state(state[self._random_key])
        saved_format, version = state["version"].tolist()
        if saved_format != _FORMAT:
            raise DataError(f"{directory} has checkpoint format {saved_format}, this version reads {_FORMAT}")
        return int(version)

    def _models_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for name, (model, optimizer) in self._models.items():
            options = StateDictOptions()
            state[f"{name}.model"], state[f"{name}.optimizer"] = get_state_dict(model, optimizer.torch_optimizer, options=options)
        return state

    @property
    def _random_key(self) -> str:
        return f"random.{self._ranks.rank}"

    def _random_state(self) -> dict[str, torch.Tensor]:
        return {self._random_key: torch.get_rng_state()}


def _causes(error: CheckpointException) -> str:
    """What each rank ran into. (torch's exception is no Exception, and its text is a traceback.)"""
    return "; ".join(f"rank {rank}: {cause[0]!r}" for rank, cause in error.failures.items())


def _sync(directory: Path) -> None:
    """Makes the rename itself durable."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _quiet() -> warnings.catch_warnings:
    """torch says, as a warning, that one process saves alone, which is what `no_dist` asked for."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
