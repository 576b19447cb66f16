"""Checkpoints of the learner by torch.distributed.checkpoint.

The state is copied, written in the background to a directory next to the final one, then renamed.
Invariants
- A directory with its final name is complete and on the disk. A directory with the suffix
  `.partial` is incomplete, and is removed when the next checkpoint of the same name starts.
- The restored state is equal bit for bit, on any number of ranks. There is one random state,
  because all ranks draw the same numbers.
- The state is copied before `start` returns, so later training does not reach the file.
- One checkpoint is written at a time.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.stateful import Stateful

from async_rl.core.checksums import complete, sum_of
from async_rl.core.errors import DataError, InfrastructureError
from async_rl.learner.optimizer import Trained
from async_rl.learner.sharding import BACKEND, Ranks

_FORMAT = 2
# One rank has no process group on purpose; torch mentions it at every checkpoint.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")
_CUDA_RANDOM = "random.cuda"


class Checkpointer:
    """Saves and restores models, moments, random state, version, and other `stateful` objects."""

    def __init__(self, ranks: Ranks, trained: Trained, stateful: Mapping[str, Stateful]) -> None:
        self._ranks = ranks
        self._trained = trained
        self._stateful = stateful
        # One thread: checkpoints are finished in the order in which they were started.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        # A separate group: its collectives run in the background, next to the collectives of
        # training. One rank needs none, and so opens no listener.
        self._is_alone = ranks.world_size == 1
        self._group = None if self._is_alone else dist.new_group(backend=BACKEND)

    def start(self, directory: Path, version: int) -> Future[None]:
        """Copy the state (collective) and write it in the background.

        The future completes after the rename on rank 0; a failure is an InfrastructureError.
        """
        partial = directory.with_name(directory.name + ".partial")
        if self._ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        # Otherwise another rank could write before the directory is removed.
        self._ranks.barrier()
        state = {**self.state(), "version": torch.tensor([_FORMAT, version])}
        written: Future[Any] = async_save(  # type: ignore[assignment]
            state, checkpoint_id=partial, process_group=self._group, no_dist=self._is_alone
        )
        return self._thread.submit(self._finish, written, partial, directory)

    def _finish(self, written: Future[Any], partial: Path, directory: Path) -> None:
        try:
            written.result()
            if self._ranks.rank == 0:
                complete(partial, directory)
        except (CheckpointException, OSError) as error:
            cause = _causes(error) if isinstance(error, CheckpointException) else str(error)
            raise InfrastructureError(
                f"checkpoint {directory} could not be written: {cause}; free disk space or grant"
                " write permission, then async-rl resume the run"
            ) from error

    def load(self, directory: Path) -> int:
        """Restore everything (collective) and return the version.

        Raises DataError if the directory is not a complete checkpoint of these models.
        """
        if not (directory / ".metadata").is_file():
            raise DataError(
                f"{directory} is not a checkpoint; name a directory such as checkpoints/step_000020"
                " of a run"
            )
        state: dict[str, Any] = {**self.state(), "version": torch.zeros(2, dtype=torch.int64)}
        try:
            self._read(state, directory)
        except CheckpointException as error:
            raise DataError(
                f"checkpoint {directory} cannot be read, or is of another model or configuration:"
                f" {_causes(error)}; move it away to continue from the previous one"
            ) from error
        saved_format, version = state["version"].tolist()
        if saved_format != _FORMAT:
            raise DataError(
                f"{directory} has checkpoint format {saved_format}, but this version of async-rl"
                f" reads format {_FORMAT}; use the version that wrote it"
            )
        # Weights and moments have been read to where they are.
        for name, part in self._stateful.items():
            part.load_state_dict(state[name])
        torch.set_rng_state(state["random"])
        if _CUDA_RANDOM in state:
            torch.cuda.set_rng_state(state[_CUDA_RANDOM])
        return int(version)

    def _read(self, state: dict[str, Any], directory: Path) -> None:
        try:
            self._read_all(state, directory)
        except CheckpointException as error:
            if f"Missing key in checkpoint state_dict: {_CUDA_RANDOM}" not in _causes(error):
                raise
            # The checkpoint was written on a machine without a GPU.
            del state[_CUDA_RANDOM]
            self._read_all(state, directory)

    def _read_all(self, state: dict[str, Any], directory: Path) -> None:
        load(state, checkpoint_id=directory, process_group=self._group, no_dist=self._is_alone)

    def state(self) -> dict[str, Any]:
        """Return the live state, which `start` copies."""
        state: dict[str, Any] = {"random": torch.get_rng_state(), **_gpu_random()}
        for name, part in self._stateful.items():
            state[name] = part.state_dict()
        for name, (model, optimizer) in self._trained.items():
            model_state, moments = get_state_dict(model, optimizer.torch_optimizer)
            # Frozen base weights are in model.path already; only the adapter is saved.
            if not all(p.requires_grad for p in model.parameters()):
                model_state = {
                    n: model_state[n] for n, p in model.named_parameters() if p.requires_grad
                }
            state[f"{name}.model"] = model_state
            state[f"{name}.optimizer"] = moments
        return state


class BaseSum:
    """The checksum of frozen base weights as a `stateful` object: a checkpoint without them is of
    no use with others.
    """

    def __init__(self, model_path: Path) -> None:
        self._model_path = model_path
        self._sum = sum_of(model_path.glob("*.safetensors"))

    def state_dict(self) -> dict[str, Any]:
        """Return the bytes of the checksum."""
        return {"sha256": torch.frombuffer(bytearray(self._sum), dtype=torch.uint8)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise DataError if the checkpoint belongs to other base weights."""
        saved = bytes(state_dict["sha256"].tolist())
        if saved != self._sum:
            raise DataError(
                f"the checkpoint has an adapter for base weights with checksum {saved.hex()[:12]},"
                f" but those in {self._model_path} have {self._sum.hex()[:12]}; set model.path to"
                " the weights that the run started with"
            )


def _gpu_random() -> dict[str, torch.Tensor]:
    return {_CUDA_RANDOM: torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}


def _causes(error: CheckpointException) -> str:
    """The failure of each rank. The text of torch's exception is a traceback."""
    return "; ".join(f"rank {rank}: {cause[0]!r}" for rank, cause in error.failures.items())
