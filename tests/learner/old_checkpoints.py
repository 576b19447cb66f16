"""Checkpoints as earlier versions of this project wrote them, by torch's own code."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from async_rl.core.checksums import sums_of, write_sums
from async_rl.learner.trainer import Trainer


def save_old(trainer: Trainer, directory: Path, version: int, *, is_alone: bool = True) -> None:
    """Write one (collective unless is_alone)."""
    checkpointer = trainer._checkpointer
    numbers = list(checkpointer._objective.numbers())
    state: dict[str, Any] = {
        "random": torch.get_rng_state(),
        "objective": {"numbers": torch.tensor(numbers, dtype=torch.float64)},
        "version": torch.tensor([2, version]),
    }
    if checkpointer._reference is not None:
        state["reference"] = checkpointer._reference.state_dict()
    if checkpointer._base_sha256:
        content = bytearray(bytes.fromhex(checkpointer._base_sha256))
        state["base"] = {"sha256": torch.frombuffer(content, dtype=torch.uint8)}
    for name, (model, optimizer) in checkpointer._trained.items():
        weights, moments = get_state_dict(model, optimizer.torch_optimizer)
        if not all(p.requires_grad for p in model.parameters()):
            weights = {n: weights[n] for n, p in model.named_parameters() if p.requires_grad}
        state[f"{name}.model"] = weights
        state[f"{name}.optimizer"] = moments
    dcp.save(state, checkpoint_id=directory, no_dist=is_alone)
    if trainer._ranks.rank == 0:
        write_sums(directory, sums_of(directory))


class Crafted:
    """Unpickling it runs a command."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, (self._command,)


def plant(directory: Path, command: str) -> None:
    """Let every pickle of a checkpoint run a command, and keep its checksums right."""
    metadata = directory / ".metadata"
    content = pickle.loads(metadata.read_bytes())
    content.planner_data = Crafted(command)
    metadata.write_bytes(pickle.dumps(content))
    write_sums(directory, sums_of(directory))


def plant_in_values(directory: Path, command: str) -> None:
    """As `plant`, in the entries that are no tensors: torch reads them with weights_only=False."""
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    path = directory / "__0_0.distcp"
    old = path.read_bytes()
    with path.open("wb") as file:
        file.write(old)
        for index, info in metadata.storage_data.items():
            if ".param_groups." in index.fqn:
                made = io.BytesIO()
                torch.save(Crafted(command), made)
                info.offset = file.tell()
                info.length = len(made.getvalue())
                file.write(made.getvalue())
    assert zipfile.is_zipfile(io.BytesIO(made.getvalue()))
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    write_sums(directory, sums_of(directory))
