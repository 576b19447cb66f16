"""Measure a checkpoint: how long it blocks the learner and how long it takes to write, next to a
checkpoint of torch.

Run: `OMP_NUM_THREADS=1 python -m benchmarks.learner.checkpoint [--rounds N]`.
The two random models are one of the shape of the embedded model and one of about 350 MB. In each
round a step, a checkpoint of this project and one of `torch.distributed.checkpoint` follow each
other, the latter as earlier code of this project did: `async_save`, then checksums of the files.
Each is written in parallel with the next step, and once more without a step. A plain copy
duplicates the same state in new host memory. The first round allocates memory that is kept, and is
not counted.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save
from transformers.utils.logging import disable_progress_bar

from async_rl.composition.compose import compose
from async_rl.core.checksums import complete, sums_of
from async_rl.core.types import Group
from async_rl.learner.trainer import Trainer
from benchmarks.figures import figure
from benchmarks.generation import generation
from benchmarks.learner.learner import batches, make_groups, random_model

LARGE = {"hidden": 1024, "layers": 6, "heads": 16, "vocabulary": 4096, "head_dim": 64}
Save = Callable[[Path], Callable[[], object]]
"""Starts a checkpoint; returns the function that waits until it has its name."""


def ours(trainer: Trainer) -> Save:
    """The product's checkpoint."""

    def save(directory: Path) -> Callable[[], object]:
        return trainer.save(directory, 1).result

    return save


def torchs(trainer: Trainer) -> Save:
    """A checkpoint by torch.distributed.checkpoint, as earlier code of this project wrote them."""
    checkpointer = trainer._checkpointer

    def save(directory: Path) -> Callable[[], object]:
        partial = directory.with_name(directory.name + ".partial")
        state: dict[str, Any] = {"random": torch.get_rng_state(), "version": torch.tensor([2, 1])}
        for name, (model, optimizer) in checkpointer._trained.items():
            weights, moments = get_state_dict(model, optimizer.torch_optimizer)
            state[f"{name}.model"] = weights
            state[f"{name}.optimizer"] = moments
        written: Future[Any] = async_save(  # type: ignore[assignment]
            state, checkpoint_id=partial, no_dist=True
        )

        def finish() -> None:
            written.result()
            complete(partial, directory, sums_of(partial))

        return finish

    return save


def measure(
    name: str, model_path: Path, groups: Sequence[Group], directory: Path, *, rounds: int
) -> None:
    """Print the figures of one model."""
    config = compose("grpo_code", ["learner.optimizer.lr=1e-5"])
    trainer = Trainer(config, model_path, rank=0, world_size=1, device=torch.device("cpu"))
    saves = {"": ours(trainer), "torch's ": torchs(trainer)}
    columns: dict[str, list[float]] = {}
    for round_number in range(rounds + 1):
        seconds = {
            "step": _seconds(lambda: trainer.step(groups, 0)),
            "copy": _seconds(lambda: [x.clone() for x in trainer._checkpointer.tensors().values()]),
        }
        for which, save in saves.items():
            path = directory / f"step_{round_number}"
            started_s = time.perf_counter()
            finish = save(path)
            seconds[f"{which}stall"] = time.perf_counter() - started_s
            seconds[f"{which}beside"] = _seconds(lambda: trainer.step(groups, 0))
            finish()
            seconds[f"{which}written"] = time.perf_counter() - started_s
            # Without a step next to it.
            alone = directory / "alone"
            started_s = time.perf_counter()
            save(alone)()
            seconds[f"{which}alone"] = time.perf_counter() - started_s
            size_bytes = sum(file.stat().st_size for file in alone.iterdir())
            for each in (path, alone):
                shutil.rmtree(each)
        if round_number:
            for column, value in seconds.items():
                columns.setdefault(column, []).append(value)
    median = {column: statistics.median(values) for column, values in columns.items()}
    figure(f"{name}: size", size_bytes / 1e6, "MB")
    figure(f"{name}: step", median["step"] * 1e3, "ms")
    figure(f"{name}: copy of the state to new host memory", median["copy"] * 1e3, "ms")
    excess = statistics.median(
        (s - c) / t
        for s, c, t in zip(columns["stall"], columns["copy"], columns["step"], strict=True)
    )
    figure(f"{name}: stall beyond the copy, share of a step", excess, "", goal="<= 0.05")
    for which in saves:
        stall_s = median[f"{which}stall"]
        alone_s = median[f"{which}alone"]
        figure(f"{name}: {which}stall per checkpoint", stall_s * 1e3, "ms")
        figure(f"{name}: {which}stall, bytes copied", size_bytes / stall_s / 1e9, "GB/s")
        figure(f"{name}: {which}time until it has its name", median[f"{which}written"] * 1e3, "ms")
        figure(f"{name}: {which}time without a step next to it", alone_s * 1e3, "ms")
        figure(f"{name}: {which}bytes written", size_bytes / alone_s / 1e9, "GB/s")
        figure(f"{name}: {which}step during the writing", median[f"{which}beside"] * 1e3, "ms")
    for what, goal in (("stall", "<= 0.7"), ("alone", "<= 0.5")):
        ratio = statistics.median(
            a / b for a, b in zip(columns[what], columns[f"torch's {what}"], strict=True)
        )
        label = "stall" if what == "stall" else "time without a step"
        figure(f"{name}: {label}, divided by torch's", ratio, "", goal=goal)


def _seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def main() -> None:
    """Measure both models and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=Path.cwd()) as scratch:
        directory = Path(scratch)
        measure(
            "1.1M",
            random_model(directory / "tiny"),
            batches()["embedded"],
            directory,
            rounds=arguments.rounds,
        )
        large = generation.random_model(directory / "large", **LARGE)
        measure(
            "350 MB",
            large,
            make_groups([[1, 2, 3]] * 16, [32] * 16),
            directory,
            rounds=max(2, arguments.rounds // 2),
        )


if __name__ == "__main__":
    main()
