"""Measure how long a checkpoint blocks the learner, compared with a step and with a plain copy.

Run: `OMP_NUM_THREADS=1 python -m benchmarks.learner.checkpoint [--rounds N]`.
The plain copy duplicates the same state in newly allocated host memory. The two random models are
one of the shape of the embedded model and one of about 350 MB. Steps, copies and checkpoints
alternate. The checkpoint is written in parallel with the next steps; the benchmark also reports the
time until the checkpoint has its final name, and the duration of a step during the writing.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.utils._pytree import tree_map_only
from transformers.utils.logging import disable_progress_bar

from async_rl.composition.compose import compose
from async_rl.core.types import Group
from async_rl.learner.trainer import Trainer
from benchmarks.figures import figure
from benchmarks.generation import generation
from benchmarks.learner.learner import batches, make_groups, random_model

LARGE = {"hidden": 1024, "layers": 6, "heads": 16, "vocabulary": 4096, "head_dim": 64}


def measure(
    name: str, model_path: Path, groups: Sequence[Group], directory: Path, *, rounds: int
) -> None:
    """Print the figures of one model."""
    config = compose("grpo_code", ["learner.optimizer.lr=1e-5"])
    trainer = Trainer(
        config,
        model_path,
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
        failed_batches=directory,
    )
    columns: dict[str, list[float]] = {
        "step": [],
        "copy": [],
        "stall": [],
        "beside": [],
        "written": [],
    }
    for round_number in range(rounds + 1):
        seconds = dict.fromkeys(columns, 0.0)
        seconds["step"] = _seconds(lambda: trainer.step(groups, 0))
        seconds["copy"] = _copy_s(trainer)
        started_s = time.perf_counter()
        path = directory / f"step_{round_number}"
        written = trainer.save(path, round_number)
        seconds["stall"] = time.perf_counter() - started_s
        seconds["beside"] = _seconds(lambda: trainer.step(groups, 0))
        written.result()
        seconds["written"] = time.perf_counter() - started_s
        shutil.rmtree(path)
        if round_number:
            for column, value in seconds.items():
                columns[column].append(value)
    step_s, copy_s, stall_s, beside_s, written_s = (
        statistics.median(values) for values in columns.values()
    )
    excess = statistics.median(
        (s - c) / t
        for s, c, t in zip(columns["stall"], columns["copy"], columns["step"], strict=True)
    )
    figure(f"{name}: step", step_s * 1e3, "ms")
    figure(f"{name}: copy of the state to host memory", copy_s * 1e3, "ms")
    figure(f"{name}: stall per checkpoint", stall_s * 1e3, "ms")
    figure(f"{name}: stall beyond the copy, share of a step", excess, "", goal="<= 0.05")
    figure(f"{name}: until it has its name", written_s * 1e3, "ms")
    figure(f"{name}: step during the writing", beside_s * 1e3, "ms")


def _seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def _copy_s(trainer: Trainer) -> float:
    state = trainer._checkpointer.state()
    return _seconds(
        lambda: tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), state)
    )


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
            rounds=max(1, arguments.rounds // 3),
        )


if __name__ == "__main__":
    main()
