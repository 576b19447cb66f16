"""The number of samples to write, and the two forms in which one leaves the rollout: a trajectory
and the argument of a reward function. Pure.
"""

from __future__ import annotations

import msgspec
import numpy as np

from async_rl.config.run import RunConfig
from async_rl.core.types import NO_VERSION, Prompt, Purpose, Score, Ticket, Trajectory
from async_rl.rewards.verifier.protocol import RewardSample
from async_rl.rollouts.conversation import Written


def num_written(config: RunConfig, purpose: Purpose, num_samples: int) -> int:
    """Return the samples that the engine writes for a ticket of `num_samples`.

    ReMax adds a greedy answer in training. In evaluation several samples have one next to them,
    which costs little then and shows how much sampling loses.
    """
    if purpose is Purpose.TRAIN:
        has_greedy = config.algorithm.advantage.kind == "remax"
    else:
        has_greedy = config.evaluation.num_samples > 1
    return num_samples + has_greedy


def trajectory(
    prompt: Prompt, done: Written, score: Score, *, clock: tuple[float, ...] = ()
) -> Trajectory:
    """Return the sample behind its prompt, of which nothing is trained."""
    num_prompt = len(prompt.token_ids)
    no_logprobs = np.zeros(num_prompt, np.float32)
    no_versions = np.full(num_prompt, NO_VERSION, np.int32)
    return Trajectory(
        token_ids=np.concatenate([prompt.token_ids, done.token_ids]).astype(np.int32),
        prompt_length=num_prompt,
        loss_mask=np.concatenate([np.zeros(num_prompt, np.bool_), done.is_written]),
        behavior_logprobs=np.concatenate([no_logprobs, done.logprobs]).astype(np.float32),
        versions=np.concatenate([no_versions, done.versions]).astype(np.int32),
        is_truncated=done.is_truncated,
        score=score,
        starts=tuple(num_prompt + start for start in done.starts),
        clock=clock,
    )


def reward_sample(ticket: Ticket, done: Written) -> RewardSample:
    """Return the argument of a reward function."""
    prompt = ticket.prompt
    problem = ticket.prompt.problem
    return RewardSample(
        prompt_id=prompt.prompt_id,
        prompt=prompt.text,
        response=done.answer,
        transcript=done.transcript,
        token_ids=done.token_ids.tolist(),
        is_written=done.is_written.tolist(),
        data_source=prompt.data_source,
        row=msgspec.json.decode(problem.row or "{}"),
        tests=problem.tests,
        setup=problem.setup,
        is_truncated=done.is_truncated,
        max_tokens=ticket.sampling.max_new_tokens,
    )
