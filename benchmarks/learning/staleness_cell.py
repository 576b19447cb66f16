"""One run of the league in one process: the product's learner, data and scoring, a small sampler.

A whole run costs about five core-minutes, most of them for the engine and its start. Here a step is
`Trainer.step` of the product on groups that `bench.py` drew from the weights of an older version,
scored by the embedded task's tests. Step t trains the batch that version t - 1 - age sampled.

Those versions exist from the first step on, because a run-up comes before it: the same slow
training on fresh data for all cells of a seed. Its last policy is version 0 of the cell, and its
batches have the versions below 0. A cell without a run-up starts from the initial policy, and
samples version 0 as long as there is no older one, as a whole run with buffer.age_rule=exact does.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from async_rl.config.run import RunConfig
from async_rl.core.codec import decode, encode
from async_rl.core.errors import ConfigError, NonFiniteError
from async_rl.core.types import Group
from async_rl.learner.trainer import Trainer
from benchmarks.learning.bench import Bench

GOAL = 0.80
# A fall from the best pass rate far above the noise of two evaluations of 128 samples, 0.05.
COLLAPSE = 0.2
# Steps in which the learner trains what its own versions sampled, before a cell that has reached
# the goal may end: it may still collapse.
STEPS_ON_OWN_DATA = 30
_HELD = 3
_NAMES = (
    "policy/effective_sequences",
    "policy/effective_sample_size",
    "policy/step_scale",
    "policy/entropy",
    "reward/mean",
    "staleness/mean_versions",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunUp:
    """What happened before the first step of a cell.

    model_path: the last policy, version 0 of the cells; batches: what versions -n to 0 sampled.
    """

    model_path: Path
    batches: Sequence[list[Group]]


def run_up(bench: Bench, config: RunConfig, directory: Path) -> RunUp:
    """Train on fresh data as the configuration says, and keep the result in the directory. Return
    what is there, if another process has made it.

    config: buffer.max_staleness_versions is num_steps, because the samples carry the versions that
    they have for a cell, and are num_steps old for the learner of the run-up.
    """
    file, policy = directory / "batches.msgpack", directory / "policy"
    if not file.exists():
        trainer = make_trainer(config, bench.model_path)
        bench.load(trainer)
        made = []
        for number in range(config.num_steps):
            made.append(bench.batch(config, number=number, version=number - config.num_steps))
            trainer.step(made[-1], number)
            bench.load(trainer)
        made.append(bench.batch(config, number=config.num_steps, version=0))
        trainer.export_hf(policy)
        new = file.with_suffix(".new")
        new.write_bytes(encode(made))
        new.rename(file)
    return RunUp(model_path=policy, batches=decode(file.read_bytes(), list[list[Group]]))


def is_decided(rates: Mapping[int, float], age: int) -> bool:
    """Return whether more steps would change nothing: the last evaluations all reach the goal, late
    enough for the age, or the policy is far below its best in all of them.

    rates: held-out pass rate by step.
    """
    last = list(rates.values())[-_HELD:]
    if len(rates) <= _HELD:
        return False
    is_late = age == 0 or max(rates) >= age + STEPS_ON_OWN_DATA
    holds = min(last) >= GOAL - COLLAPSE / 4 and statistics.fmean(last) >= GOAL
    has_collapsed = max(rates.values()) - max(last) > COLLAPSE
    return (holds and is_late) or has_collapsed


class _Columns:
    """The means of the kept columns since the last row."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, scalars: Mapping[str, float]) -> None:
        """Add a step."""
        for name in _NAMES:
            if name in scalars:
                self._values.setdefault(name, []).append(scalars[name])

    def take(self) -> dict[str, float]:
        """Return the means and start anew."""
        values, self._values = self._values, {}
        return {name: round(statistics.fmean(v), 4) for name, v in values.items()}


def make_trainer(config: RunConfig, model_path: Path) -> Trainer:
    """Return the learner's engine, alone on this CPU."""
    return Trainer(config, model_path, rank=0, world_size=1, device=torch.device("cpu"))


def run_cell(
    bench: Bench,
    config: RunConfig,
    *,
    start: RunUp | None = None,
    all_steps: bool = False,
    prepare: Callable[[Trainer], None] | None = None,
) -> list[dict[str, Any]]:
    """Train as the configuration says, until the cell is decided or with `all_steps` to the last
    step, and return a row per evaluation. start: None for the initial policy. prepare: changes the
    trainer before its first step.

    Raises ConfigError for a setting that needs more than one process, and for an age above the
    steps of the run-up.
    """
    # The last versions of the bound are for the groups that are used again.
    num_reused = config.buffer.uses_per_group - 1
    age = config.buffer.max_staleness_versions - num_reused
    size = config.buffer.groups_per_step
    _check(config, start)
    model_path = bench.model_path if start is None else start.model_path
    trainer = make_trainer(config, model_path)
    if prepare is not None:
        prepare(trainer)
    bench.load(trainer)
    if start is None:
        before = [bench.batch(config, number=number, version=0) for number in range(age + 1)]
        first = age
    else:
        before = list(start.batches[-age - 1 :])
        first = len(start.batches) - 1
    queue = deque(before)
    used: deque[list[Group]] = deque(maxlen=num_reused)
    rates = {0: bench.pass_rate(config, 0)}
    rows: list[dict[str, Any]] = [{"step": 0, "samples": 0, "eval/pass_at_1": rates[0]}]
    columns = _Columns()
    for version in range(config.num_steps):
        if 0 < version < config.num_steps - age:
            queue.append(bench.batch(config, number=first + version, version=version))
        step = version + 1
        samples = step * size * config.generation.group_size
        try:
            new = queue.popleft()
            scalars = trainer.step([*itertools.chain.from_iterable(used), *new], version).scalars
        except NonFiniteError:
            rows.append({"step": step, "samples": samples, "eval/pass_at_1": 0.0})
            return rows
        used.append(new)
        # The oldest groups were trained first `num_reused` steps before.
        sampled = max(version - num_reused, 0) - age
        expected = version - (max(sampled, 0) if start is None else sampled)
        ages = {scalars["staleness/max_versions"]}
        if num_reused == 0:
            ages.add(scalars["staleness/mean_versions"])
        assert ages == {expected}, f"step {step} trained ages {ages} instead of {expected}"
        columns.add(scalars)
        bench.load(trainer)
        if step % config.evaluation.every_steps == 0:
            rates[step] = bench.pass_rate(config, step)
            row = {"step": step, "samples": samples, "eval/pass_at_1": round(rates[step], 4)}
            rows.append(row | columns.take())
            if not all_steps and is_decided(rates, age):
                break
    return rows


def _check(config: RunConfig, start: RunUp | None) -> None:
    buffer = config.buffer
    if buffer.age_rule != "exact" and buffer.uses_per_group == 1:
        raise ConfigError(
            f"buffer.age_rule={buffer.age_rule}: a cell trains every group at an exact age; set"
            " buffer.age_rule=exact"
        )
    if buffer.uniform_groups != "train":
        raise ConfigError(
            f"buffer.uniform_groups={buffer.uniform_groups}: the run-up's policies are gone, so"
            " their groups cannot be replaced; set buffer.uniform_groups=train"
        )
    if start is not None and buffer.max_staleness_versions >= len(start.batches):
        raise ConfigError(
            f"buffer.max_staleness_versions={buffer.max_staleness_versions} is above the"
            f" {len(start.batches) - 1} steps of the run-up"
        )


def samples_to(goal: float, rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the trained samples when the pass rate reaches the goal, on the line between two
    evaluations; None if it never does.
    """
    before = (0.0, -math.inf)
    for row in rows:
        now = (float(row["samples"]), float(row["eval/pass_at_1"]))
        if now[1] >= goal:
            share = 1.0
            if math.isfinite(before[1]):
                share = (goal - before[1]) / (now[1] - before[1])
            return before[0] + share * (now[0] - before[0])
        before = now
    return None
