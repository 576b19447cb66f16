"""Sampling parameters, and best-of-n: the selection of a prompt's group from the drawn samples.

Pure. The buffer requests `generation.num_drawn` samples; the generator keeps the `best_of` them
once all are scored.
"""

from __future__ import annotations

from collections.abc import Sequence

from async_rl.config.run import RunConfig
from async_rl.core.types import Purpose, Sampling, Trajectory


def sampling_of(config: RunConfig, purpose: Purpose) -> Sampling:
    """Return the sampling parameters of a group.

    The support is always the full vocabulary: the learner computes log-probs of the full
    softmax, so sampling with top_p, top_k or a minimum length would train on a wrong ratio.
    """
    generation = config.generation
    is_training = purpose is Purpose.TRAIN
    return Sampling(
        temperature=generation.temperature if is_training else config.evaluation.temperature,
        max_new_tokens=config.data.max_response_tokens,
    )


def best_of(samples: Sequence[Trajectory], *, count: int) -> list[Trajectory]:
    """Return the `count` samples with the highest rewards, in the order of drawing.

    Of samples with equal rewards the longest are kept.
    """
    ranked = sorted(
        range(len(samples)),
        # Longer samples first among equals, as in AReaL; then by number, so that the choice can be
        # repeated.
        key=lambda i: (-samples[i].score.reward, -samples[i].response_length, i),
    )
    return [samples[i] for i in sorted(ranked[:count])]
