"""One rank that trains the recorded batches of a run again, without generators and buffer:
`python -m async_rl.training.replaying DIRECTORY MODEL_PATH START LAST PARENT_PID RANK`.

takes: batches from the run's store, a checkpoint · waits for: the other ranks · writes (rank 0):
metrics.jsonl and versions.jsonl in the replay's directory, as a run does
Invariant: with the settings, ranks and threads of the run, the weights have the same bits as in the
run: a step depends on the checkpoint, its batch and its version only.
"""

import faulthandler
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from async_rl.buffer.store.ledger import reading
from async_rl.buffer.store.trajectories import batch_of
from async_rl.config.run import RunConfig
from async_rl.core import records
from async_rl.core.errors import AsyncRLError, DataError
from async_rl.core.os import die_with_parent, leave
from async_rl.learner.loading import learner_device
from async_rl.training import checkpoints
from async_rl.training.ranks import open_trainer
from async_rl.weights.block import SharedTensors
from async_rl.wire.addresses import LOOPBACK


def replay(
    directory: Path, model_path: Path, versions: range, rank: int
) -> Iterator[tuple[int, int, Mapping[str, float]]]:
    """Train the steps after these versions, all ranks in the same order, and yield (step, checksum
    of the weights after it as in `Published`, metrics). The checksum is 0 above rank 0.

    directory: `<run>/replays/<n>`, with the configuration.  versions: the first one is of a
    checkpoint, or 0 for the start model.
    """
    run_dir = directory.parents[1]
    config = RunConfig.model_validate(msgspec.yaml.decode((directory / "config.yaml").read_bytes()))
    trainer = open_trainer(
        config,
        model_path,
        directory,
        rank=rank,
        device=learner_device(config.learner.gpus_each),
        host=LOOPBACK,
        timeout_s=1800.0,
    )
    if versions.start:
        trainer.load(checkpoints.directory_of(run_dir, versions.start))
    # The same block as in the run, so that the checksums can be compared.
    publisher = SharedTensors(trainer.tensor_specs())
    with publisher, reading(run_dir) as stored:
        for version in versions:
            # Every rank reads the whole batch from the store: no buffer is there to divide it.
            groups = batch_of(stored, version + 1)
            if groups is None:
                raise DataError(
                    f"the trajectories of step {version + 1} are no longer in {run_dir}; the run"
                    " deleted them during the replay (recording=full keeps them)"
                )
            result = trainer.step(groups, version)
            checksum = 0
            if rank == 0:
                checksum = publisher.write(version + 1, trainer.full_tensors()).checksum
            else:
                # Gathering is collective, and rank 0 alone gets tensors.
                for _ in trainer.full_tensors():
                    pass
            yield version + 1, checksum, result.scalars


def main() -> int:
    """Run one rank; return its exit code."""
    directory = Path(sys.argv[1])
    model_path = Path(sys.argv[2])
    start, last, parent_pid, rank = map(int, sys.argv[3:])
    # Before the model is loaded: an interrupted command must not leave ranks behind.
    die_with_parent(parent_pid)
    try:
        started_s = time.monotonic()
        for step, checksum, metrics in replay(directory, model_path, range(start, last), rank):
            # Rank 0 writes each step to the files of the replay, which a user follows.
            if rank == 0:
                row = {"step": step, "time_s": round(time.monotonic() - started_s, 3), **metrics}
                records.append(directory / "metrics.jsonl", [row])
                published = checkpoints.Published(version=step, checksum=checksum)
                records.append(directory / checkpoints.VERSIONS_FILE, [published])
    except AsyncRLError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    faulthandler.enable()
    leave(main())
