"""A program, its limits, and the cells that run it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from async_rl.core.errors import InfrastructureError
from async_rl.core.frozen import frozen
from async_rl.rewards.verifier.checks import ChildRun
from async_rl.rewards.verifier.outcomes import Answers, ChildFault
from async_rl.sandbox.cell import CellFailed, Job, Outcome
from async_rl.sandbox.cells import Cells
from async_rl.sandbox.protocol import JobSpec, Mode

_TRIES = 2


@frozen
class Program:
    """One program of a request. stop: its results end at the first failure."""

    code: str
    setup: str
    cells: Cells
    cpu_s: float
    memory_bytes: int
    output_bytes: int
    stop: bool

    def job(
        self,
        mode: Mode,
        num_runs: int,
        payload: tuple[Any, ...],
        *,
        num_tests: int = 1,
        inputs: Sequence[bytes] = (),
    ) -> Job:
        """A job within the limits of the program."""
        spec = JobSpec(
            mode,
            num_runs,
            num_tests=num_tests,
            cpu_s=self.cpu_s,
            memory_bytes=self.memory_bytes,
            output_bytes=self.output_bytes,
        )
        return Job(spec, payload, inputs)

    async def run(self, job: Job, read: Callable[[Outcome, JobSpec], Answers]) -> ChildRun:
        """Run a job and read its output. Raises InfrastructureError if no cell could run it."""
        problem: Exception | None = None
        for _ in range(_TRIES):
            started = time.monotonic()
            try:
                outcome = await self.cells.run(job)
                answers = read(outcome, job.spec)
            except (CellFailed, ChildFault) as error:
                problem = error
                continue
            return ChildRun(
                outcome=outcome,
                answers=answers.answers,
                is_slow=answers.is_slow,
                wall_s=time.monotonic() - started,
                stop=self.stop,
            )
        raise InfrastructureError(
            f"no cell could run the program, tried {_TRIES} times: {problem}"
        ) from problem
