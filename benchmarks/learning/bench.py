"""What the cells of one process share: the model, the prompts, the sampler and the verdicts.

A cell (staleness_cell.py) samples with `Bench.batch` from the weights that `Bench.load` copied
last, and is evaluated with `Bench.pass_rate`. The same weights, seed and number give the same
samples in every cell.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from async_rl.config.run import RunConfig
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
from async_rl.rewards.responses import extract_code
from benchmarks.learning.sampler import Response, Sampler


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
    """Use it in a `with` block: the verifier's processes live as long."""

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
                order=PromptOrder(
                    config.seed, len(train), shuffle=config.data.order != "sequential"
                ),
                held_out=held_out_prompts(config, self._tokenizer),
                vocabulary_size=len(self._tokenizer),
            )
        return self._prompts[config.seed]

    def load(self, trainer: Trainer) -> None:
        """Sample from the trainer's weights from now on."""
        names = (spec.name for spec in trainer.tensor_specs())
        self.sampler.load(dict(zip(names, trainer.full_tensors(), strict=True)))

    def batch(self, config: RunConfig, *, number: int, version: int) -> list[Group]:
        """Sample the groups of batch `number` from the loaded weights of `version`."""
        size = config.buffer.groups_per_step
        prompts = self.prompts(config)
        chosen = [prompts.prompt(Purpose.TRAIN, number * size + i) for i in range(size)]
        responses = self._sample(config, chosen, config.generation.group_size, number)
        return [
            self._group(number * size + i, prompt, members, version)
            for i, (prompt, members) in enumerate(zip(chosen, responses, strict=True))
        ]

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
