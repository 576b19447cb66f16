"""Sampling parameters, and best-of-n: the selection of a prompt's group from the drawn samples.

Pure. The buffer requests `generation.num_drawn` samples; the generator keeps the `best_of` them
once all are scored.
"""

import json
from collections.abc import Sequence

import msgspec

from async_rl.config.base import by_name
from async_rl.config.run import RunConfig
from async_rl.core.calls import Support
from async_rl.core.types import Purpose, Sampling, Trajectory


def sampling_of(config: RunConfig, purpose: Purpose) -> Sampling:
    """Return the sampling parameters of a group."""
    section = config.generation if purpose is Purpose.TRAIN else config.evaluation
    return Sampling(
        temperature=section.temperature,
        max_new_tokens=config.data.max_response_tokens,
        support=support_of(section.sampling),
    )


def supports_of(config: RunConfig) -> list[Support]:
    """Return the supports of training and evaluation."""
    return [sampling_of(config, purpose).support for purpose in Purpose]


def support_of(entries: Sequence[str]) -> Support:
    """Return the support that name=value pairs describe. Raises ValueError."""
    fields = {
        name: text if name == "grammar" else json.loads(text)
        for name, text in by_name(entries).items()
    }
    try:
        support = msgspec.convert(fields, Support, str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    # Text that only starts like JSON shows here.
    support.grammar_kind  # noqa: B018
    return support


def best_of(samples: Sequence[Trajectory], *, count: int) -> list[Trajectory]:
    """Return the `count` samples with the highest rewards, in the order of drawing.

    Of samples with equal rewards the longest are kept.
    """
    ranked = sorted(
        range(len(samples)),
        # Longer samples first among equals, as in AReaL; then in their order, so that the choice
        # can be repeated.
        key=lambda i: (-samples[i].score.reward, -samples[i].response_length),
    )
    return [samples[i] for i in sorted(ranked[:count])]
