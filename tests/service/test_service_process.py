"""The learner's process of a service: its handlers, reports and end. A recorder stands for the
supervisor.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from learner_support import make_config
from training_support import RUN, SERVICE, create, data_request, make_datum, optim

from async_rl.observability.activity import Activity
from async_rl.observability.catalogue import describe
from async_rl.protocol.service import Execute, Operation
from async_rl.service.serving import run


class World:
    """handlers: set once it serves; reports: step and numbers."""

    def __init__(self, model_path: Path, run_dir: Path) -> None:
        self.serving = asyncio.Event()
        self.handlers: Any = None
        self.reports: list[tuple[int, dict[str, float]]] = []
        self.context: Any = SimpleNamespace(
            config=make_config("grpo_code", *SERVICE),
            model_path=model_path,
            run_dir=run_dir,
            version=-1,
            activity=Activity(),
            stopping=asyncio.Event(),
            serve=self.serve,
            report=self.report,
        )

    async def serve(self, handlers: Any) -> None:
        self.handlers = handlers
        self.serving.set()

    async def report(self, step: int, *, scalars: dict[str, float]) -> None:
        self.reports.append((step, scalars))

    async def ask(self, operation: Operation, body: bytes, step: int = 0) -> Any:
        request = Execute(run_id=RUN, operation=operation, body=body, step=step)
        return await self.handlers[Execute](request)


async def test_requests_are_executed_in_order_and_new_steps_reported(
    model_path: Path, tmp_path: Path
) -> None:
    world = World(model_path, tmp_path)
    process = asyncio.create_task(run(world.context))
    await world.serving.wait()
    body = data_request([make_datum(np.random.default_rng(0), 9, "ppo")], "ppo")
    # Pipelined: all are sent before the first is answered.
    answers = await asyncio.gather(
        world.ask("create_model", create()),
        world.ask("forward_backward", body),
        world.ask("optim_step", optim(), 1),
        world.ask("forward_backward", body),
        world.ask("optim_step", optim(), 7),
    )
    assert [executed.error for executed in answers] == [""] * 5
    assert [executed.version for executed in answers] == [0, 0, 1, 1, 2]
    assert [step for step, _ in world.reports] == [1, 7]
    assert world.context.version == 7
    assert [name for name in world.reports[0][1] if describe(name) is None] == []
    counters = world.context.activity.snapshot().counters
    assert counters["tokens_trained"] == 18
    # A repetition is in the metrics already.
    assert (await world.ask("optim_step", optim())).version == 3
    assert len(world.reports) == 2
    world.context.stopping.set()
    await process
