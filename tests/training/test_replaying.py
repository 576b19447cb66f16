"""The ranks of a replay wait for each other without a deadline between steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from composing import compose_unchecked
from warm_processes import warm_context

from async_rl.config.base import as_builtins
from async_rl.training import replaying
from async_rl.training.replays import Plan

COLLECTIVE_S, STOPPED_S = 2.0, 5.0


class Summing:
    """Stands for the trainer: a step is one collective operation."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def tensor_specs(self) -> list[Any]:
        return []

    def full_tensors(self) -> Iterator[Any]:
        return iter(())

    def step(self, groups: list[Any], version: int) -> Any:
        total = torch.ones(1)
        dist.all_reduce(total)
        return SimpleNamespace(scalars={"sum": float(total)})


def replay(directory: Path, rank: int, results: Any) -> None:
    config = as_builtins(compose_unchecked("grpo_code", ["learner.ranks=2"]))
    plan = Plan(
        directory=str(directory),
        run_dir=str(directory),
        model_path="",
        config=config,
        checkpoint=None,
        start=0,
        last=3,
    )
    with (
        patch.object(replaying, "_COLLECTIVE_S", COLLECTIVE_S),
        patch.object(replaying, "Trainer", Summing),
        patch.object(replaying, "reading", contextlib.nullcontext),
        patch.object(replaying, "batch_of", lambda _, step: [step]),
    ):
        for step in replaying.replay(plan, rank):
            results.put((rank, step.step, step.metrics["sum"]))
            if rank == 0 and step.step == 1:
                time.sleep(STOPPED_S)
    dist.destroy_process_group()


def test_a_stopped_terminal_does_not_end_the_other_ranks(tmp_path: Path) -> None:
    """The terminal is stopped for longer than a collective operation may wait."""
    context = warm_context()
    results = context.Queue()
    ranks = [
        context.Process(target=replay, args=(tmp_path, rank, results), daemon=True)
        for rank in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    found = sorted(results.get(timeout=5) for _ in range(6))
    assert found == [(rank, step, 2.0) for rank in (0, 1) for step in (1, 2, 3)]
