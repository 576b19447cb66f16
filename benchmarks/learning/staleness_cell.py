"""One run of the league in one process: the product's learner, data and scoring, a small sampler.

A whole run costs about five core-minutes, most of them for the engine and its start. Here a step is
`Trainer.step` of the product on groups that `sampler.py` drew from the weights of an older version,
scored by the embedded task's tests. The age is exact by construction: step t trains the batch that
version t - 1 - age sampled, or version 0 as long as there is no such version, as in a whole run
with buffer.age_rule. All methods get the same samples of version 0 for the same seed.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError, NonFiniteError
from async_rl.core.heads import head_of
from async_rl.core.types import (
    CodeProblem,
    Group,
    Prompt,
    Purpose,
    Score,
    Trajectory,
    Verdict,
)
from async_rl.data.prompt_file import PromptOrder, RunPrompts
from async_rl.data.prompts import held_out_prompts, train_prompts
from async_rl.launchers.api.verifier import Verifier
from async_rl.learner.sharding import ensure_group_of_one
from async_rl.learner.trainer import Trainer
from async_rl.rewards.extraction import extract_code
from benchmarks.learning.sampler import Response, Sampler

GOAL = 0.80
# A fall from the best pass rate far above the noise of two evaluations of 128 samples, 0.05.
COLLAPSE = 0.2
# Steps at full age before a cell that has reached the goal may end: it may still collapse.
_STEPS_AT_AGE = 60
_HELD = 3
# Of 8 groups each: late in a run most groups are solved, and DAPO draws until it has a batch.
_MOST_DRAWS = 4
_NAMES = (
    "policy/effective_sequences",
    "policy/effective_sample_size",
    "policy/step_scale",
    "policy/entropy",
    "reward/mean",
)


def is_decided(rates: Mapping[int, float], age: int) -> bool:
    """Return whether more steps would change nothing: the last evaluations all reach the goal, late
    enough for the age, or the policy is far below its best in all of them.

    rates: held-out pass rate by step.
    """
    last = list(rates.values())[-_HELD:]
    if len(rates) <= _HELD:
        return False
    is_late = age == 0 or max(rates) >= age + _STEPS_AT_AGE
    holds = min(last) >= GOAL - COLLAPSE / 4 and statistics.fmean(last) >= GOAL
    has_collapsed = max(rates.values()) - max(last) > COLLAPSE
    return (holds and is_late) or has_collapsed


class Judge:
    """The product's verifier, with a memory: a policy often writes the same program again."""

    def __init__(self) -> None:
        self._verifier = Verifier({"verifiers.cells": 1})
        self._known: dict[tuple[str, str], float] = {}

    def __enter__(self) -> Self:
        self._verifier.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._verifier.__exit__()

    def reward(self, name: str, problem: CodeProblem, response: str) -> float:
        """Return 1 if the program in the response passes all tests of the problem, else 0.

        name: of the problem.
        """
        code = extract_code(response, "auto")
        if code is None:
            return 0.0
        if (name, code) not in self._known:
            verdict = self._verifier.check(code, problem.tests, setup=problem.setup).verdict
            self._known[name, code] = float(verdict is Verdict.PASS)
        return self._known[name, code]


class Bench:
    """What the cells of one command share: model, prompts, verdicts and the samples of version 0.

    Use it in a `with` block.
    """

    def __init__(self, model_path: Path) -> None:
        from transformers import AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        torch.set_num_threads(1)
        ensure_group_of_one(torch.device("cpu"))
        self.model_path = model_path
        self.sampler = Sampler(model_path)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
        self._judge = Judge()
        self._prompts: dict[int, RunPrompts] = {}
        self._first: dict[tuple[int, int], list[Group]] = {}

    def __enter__(self) -> Self:
        self._judge.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._judge.__exit__()

    def prompts(self, config: RunConfig) -> RunPrompts:
        """Return the prompts of a seed."""
        if config.seed not in self._prompts:
            train = list(train_prompts(config, self._tokenizer))
            self._prompts[config.seed] = RunPrompts(
                train=train.__getitem__,
                order=PromptOrder(config.seed, len(train), shuffle=config.data.shuffle),
                held_out=held_out_prompts(config, self._tokenizer),
                vocabulary_size=len(self._tokenizer),
            )
        return self._prompts[config.seed]

    def load(self, trainer: Trainer) -> None:
        """Sample from the trainer's weights from now on."""
        names = (name for name, *_ in trainer.tensor_specs())
        self.sampler.load(dict(zip(names, trainer.full_tensors(), strict=True)))

    def batch(self, config: RunConfig, *, number: int, version: int) -> list[Group]:
        """Sample the groups of batch `number` from the loaded weights of `version`."""
        if config.buffer.uniform_groups == "replace":
            return self._with_signal(config, number, version)
        return self._drawn(config, number, version)

    def _with_signal(self, config: RunConfig, number: int, version: int) -> list[Group]:
        """Groups of unequal rewards. Those of equal ones are replaced by groups of further prompts
        from the same weights, as often as `_MOST_DRAWS` says; then they stay.
        """
        size = config.buffer.groups_per_step
        kept: list[Group] = []
        uniform: list[Group] = []
        for draw in range(_MOST_DRAWS):
            for group in self._drawn(config, number + draw * config.num_steps, version):
                (uniform if head_of(group).is_uniform else kept).append(group)
            if len(kept) >= size:
                break
        return [*kept, *uniform][:size]

    def _drawn(self, config: RunConfig, number: int, version: int) -> list[Group]:
        key = (config.seed, number)
        if version == 0 and key in self._first:
            return self._first[key]
        size = config.buffer.groups_per_step
        prompts = self.prompts(config)
        chosen = [prompts.prompt(Purpose.TRAIN, number * size + i) for i in range(size)]
        responses = self._sample(config, chosen, config.generation.group_size, number)
        groups = [
            self._group(number * size + i, prompt, members, version)
            for i, (prompt, members) in enumerate(zip(chosen, responses, strict=True))
        ]
        if version == 0:
            self._first[key] = groups
        return groups

    def pass_rate(self, config: RunConfig, version: int) -> float:
        """Return the share of held-out prompts that one response of the loaded weights passes."""
        prompts = self.prompts(config).held_out
        responses = self._sample(config, prompts, 1, -1 - version)
        return statistics.fmean(
            self._reward(prompt, members[0])
            for prompt, members in zip(prompts, responses, strict=True)
        )

    def _sample(
        self, config: RunConfig, prompts: Sequence[Prompt], count: int, stream: int
    ) -> list[list[Response]]:
        seed = np.random.SeedSequence([config.seed, stream + 2**20]).generate_state(1)
        return self.sampler.sample(
            [prompt.token_ids.tolist() for prompt in prompts],
            num_samples=[count] * len(prompts),
            max_tokens=config.data.max_response_tokens,
            generator=torch.Generator().manual_seed(int(seed[0])),
        )

    def _reward(self, prompt: Prompt, response: Response) -> float:
        text = self._tokenizer.decode(response.token_ids, skip_special_tokens=True)
        return self._judge.reward(prompt.prompt_id, prompt.problem, text)

    def _group(
        self, group_id: int, prompt: Prompt, members: Sequence[Response], version: int
    ) -> Group:
        return Group(
            group_id=group_id,
            attempt=1,
            prompt_id=prompt.prompt_id,
            purpose=Purpose.TRAIN,
            data_source=prompt.data_source,
            generator="",
            admitted_version=version,
            trajectories=[
                trajectory(prompt, response, version, self._reward(prompt, response))
                for response in members
            ],
            generation_s=0.0,
        )


def trajectory(prompt: Prompt, response: Response, version: int, reward: float) -> Trajectory:
    """Return a scored response as the learner gets it."""
    length = len(prompt.token_ids)
    ids = np.concatenate([prompt.token_ids, np.array(response.token_ids)]).astype(np.int32)
    is_response = np.arange(len(ids)) >= length
    logprobs = np.zeros(len(ids), dtype=np.float32)
    logprobs[length:] = response.logprobs
    verdict = Verdict.PASS if reward == 1 else Verdict.WRONG_ANSWER
    return Trajectory(
        token_ids=ids,
        prompt_length=length,
        loss_mask=is_response,
        behavior_logprobs=logprobs,
        versions=np.where(is_response, version, -1).astype(np.int32),
        is_truncated=response.is_truncated,
        score=Score(reward=reward, parts={}, verdicts=(verdict,), latency_s=0.0),
    )


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


def make_trainer(config: RunConfig, model_path: Path, failed_batches: Path) -> Trainer:
    """Return the learner's engine, alone on this CPU."""
    return Trainer(
        config,
        model_path,
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
        failed_batches=failed_batches,
    )


def run_cell(
    bench: Bench,
    config: RunConfig,
    failed_batches: Path,
    *,
    all_steps: bool = False,
    prepare: Callable[[Trainer], None] | None = None,
) -> list[dict[str, Any]]:
    """Train as the configuration says, until the cell is decided or with `all_steps` to the last
    step, and return a row per evaluation. prepare: changes the trainer before its first step.

    Raises ConfigError for a setting that needs more than one process.
    """
    if config.buffer.age_rule != "exact":
        raise ConfigError(
            "buffer.age_rule=drop: a cell in one process trains every group at an exact age; run"
            " it with --live"
        )
    age, size = config.buffer.max_staleness_versions, config.buffer.groups_per_step
    trainer = make_trainer(config, bench.model_path, failed_batches)
    if prepare is not None:
        prepare(trainer)
    bench.load(trainer)
    queue: deque[list[Group]] = deque()
    rates = {0: bench.pass_rate(config, 0)}
    rows: list[dict[str, Any]] = [{"step": 0, "samples": 0, "eval/pass_at_1": rates[0]}]
    columns = _Columns()
    for version in range(config.num_steps):
        last = min(version + age, config.num_steps - 1)
        for number in range(version if version == 0 else version + age, last + 1):
            queue.append(bench.batch(config, number=number, version=version))
        try:
            scalars = trainer.step(queue.popleft(), version).scalars
        except NonFiniteError:
            samples = (version + 1) * size * config.generation.group_size
            rows.append({"step": version + 1, "samples": samples, "eval/pass_at_1": 0.0})
            return rows
        ages = {scalars["staleness/max_versions"], scalars["staleness/mean_versions"]}
        assert ages == {min(age, version)}, f"step {version + 1} trained ages {ages}"
        columns.add(scalars)
        bench.load(trainer)
        step = version + 1
        if step % config.evaluation.every_steps == 0:
            rates[step] = bench.pass_rate(config, step)
            samples = step * size * config.generation.group_size
            rows.append(
                {
                    "step": step,
                    "samples": samples,
                    "eval/pass_at_1": round(rates[step], 4),
                    **columns.take(),
                }
            )
            if not all_steps and is_decided(rates, age):
                break
    return rows


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
