"""One rank that trains the recorded batches of a run again, without generators and buffer:
`python -m async_rl.training.replaying PLAN RANK PARENT_PID`.

takes: batches from the run's store, a checkpoint · waits for: the other ranks · writes: a JSON line
per step on standard output (rank 0), metrics.jsonl and TensorBoard events in the plan's directory
Invariant: with the settings, ranks and threads of the run, the weights have the same bits as in the
run: a step depends on the checkpoint, its batch and its version only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from async_rl.buffer.store.connection import STORE_FILE
from async_rl.buffer.store.ledger import reading
from async_rl.buffer.store.trajectories import batch_of
from async_rl.config.run import RunConfig
from async_rl.core.errors import AsyncRLError, DataError
from async_rl.core.os import die_with_parent
from async_rl.learner import sharding
from async_rl.learner.trainer import StepResult, Trainer
from async_rl.monitoring.event_file import EventFile
from async_rl.training.replays import Plan, Replayed
from async_rl.weights.block import SharedTensors

_LOOPBACK = "127.0.0.1"
_COLLECTIVE_S = 1800.0
_NO_DEADLINE = timedelta(days=365)
"""The command stops all ranks if one fails, so a waiting rank needs no deadline."""


def replay(plan: Plan, rank: int) -> Iterator[Replayed]:
    """Train the steps of the plan and yield each; all ranks in the same order."""
    config = RunConfig.model_validate(plan.config)
    store = _store(plan, config)
    trainer = _trainer(plan, config, rank, store)
    if plan.checkpoint is not None:
        trainer.load(Path(plan.checkpoint))
    # The same block as in the run, so that the checksums can be compared.
    publisher = SharedTensors(trainer.tensor_specs())
    with publisher, reading(Path(plan.run_dir) / STORE_FILE) as stored:
        for version in range(plan.start, plan.last):
            if store is not None:
                _meet(store, rank, version)
            started_s = time.monotonic()
            # Every rank reads the whole batch from the store: no buffer is there to divide it.
            groups = batch_of(stored, version + 1)
            if groups is None:
                raise DataError(
                    f"the trajectories of step {version + 1} are no longer in {plan.run_dir}; the"
                    " run deleted them during the replay (recording=full keeps them)"
                )
            result: StepResult = trainer.step(groups, version)
            seconds = time.monotonic() - started_s
            checksum = 0
            if rank == 0:
                checksum = publisher.write(version + 1, trainer.full_tensors()).checksum
            else:
                # Gathering is collective, and rank 0 alone gets tensors.
                for _ in trainer.full_tensors():
                    pass
            yield Replayed(
                step=version + 1,
                checksum=checksum,
                seconds=seconds,
                metrics=result.scalars,
            )


def _store(plan: Plan, config: RunConfig) -> Any:
    """Return the store through which the ranks meet; None for one rank."""
    ranks = config.learner.ranks
    if ranks == 1:
        return None
    # A file and no port: only this user can open it.
    path = Path(plan.directory) / "rendezvous"
    return dist.FileStore(str(path), ranks)  # type: ignore[attr-defined]


def _meet(store: Any, rank: int, version: int) -> None:
    """Return once rank 0 starts the step.

    Rank 0 writes the previous step to the terminal, which a user may stop for hours. Ranks that
    waited in a collective operation would reach its deadline.
    """
    key = f"step {version}"
    if rank == 0:
        store.set(key, b"")
        return
    store.wait([key], _NO_DEADLINE)


def _trainer(plan: Plan, config: RunConfig, rank: int, store: Any) -> Trainer:
    directory = Path(plan.directory)
    ranks = config.learner.ranks
    device = torch.device("cuda", 0) if config.learner.gpus_each else torch.device("cpu")
    if store is not None:
        sharding.join(store, rank, ranks, host=_LOOPBACK, device=device, timeout_s=_COLLECTIVE_S)
    return Trainer(
        config,
        Path(plan.model_path),
        rank=rank,
        world_size=ranks,
        device=device,
        failed_batches=directory / "failed_batches",
    )


def _write(plan: Plan, steps: Iterator[Replayed]) -> None:
    """Rank 0: write each step to the files of the replay and to standard output."""
    directory = Path(plan.directory)
    events = EventFile(directory / "tensorboard")
    try:
        with (directory / "metrics.jsonl").open("wb") as rows:
            total_s = 0.0
            for step in steps:
                total_s += step.seconds
                row = {"step": step.step, "time_s": round(total_s, 3), **step.metrics}
                rows.write(msgspec.json.encode(row) + b"\n")
                # A user follows the file while the replay runs.
                rows.flush()
                for name, value in step.metrics.items():
                    events.scalar(name, value, step.step)
                sys.stdout.buffer.write(msgspec.json.encode(step) + b"\n")
                sys.stdout.buffer.flush()
    finally:
        events.close()


def main() -> int:
    """Run one rank; return its exit code."""
    path = Path(sys.argv[1])
    rank = int(sys.argv[2])
    parent_pid = int(sys.argv[3])
    # Before the model is loaded: an interrupted command must not leave ranks behind.
    die_with_parent(parent_pid)
    plan = msgspec.json.decode(path.read_bytes(), type=Plan)
    try:
        steps = replay(plan, rank)
        if rank == 0:
            _write(plan, steps)
        else:
            for _ in steps:
                pass
    except AsyncRLError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
