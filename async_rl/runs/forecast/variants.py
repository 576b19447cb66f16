"""Recorded work in other group sizes and with other limits of the response. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from async_rl.core.errors import ConfigError
from async_rl.runs.forecast.recorded import Work


class _Sizes(Protocol):
    @property
    def group_size(self) -> int:
        """Samples of a group; 0: as recorded."""

    @property
    def max_response_tokens(self) -> int:
        """Limit of a response; 0: as recorded."""


def changed_works(works: Sequence[Work], sizes: _Sizes) -> tuple[Work, ...]:
    """Return the work of groups of another size or limit.

    Samples that a larger group needs are those of the next groups. Raises ConfigError if the
    lengths of samples were not recorded.
    """
    if not sizes.group_size and not sizes.max_response_tokens:
        return tuple(works)
    if not all(work.lengths for work in works):
        raise ConfigError(
            "the run has no times of samples (recording=off, or a gap), so the forecast knows no"
            " effect of generation.group_size and data.max_response_tokens; record a run with"
            " recording=times"
        )
    return tuple(_changed(works, index, sizes) for index in range(len(works)))


def _changed(works: Sequence[Work], index: int, sizes: _Sizes) -> Work:
    work = works[index]
    number = sizes.group_size or len(work.lengths)
    following = [works[(index + further) % len(works)] for further in range(number)]
    lengths = [length for other in following for length in other.lengths][:number]
    scores = tuple(score for other in following for score in other.scores)[:number]
    if sizes.max_response_tokens:
        lengths = [min(length, sizes.max_response_tokens) for length in lengths]
    # The time before the first token does not depend on the lengths.
    ratio = work.first + (1 - work.first) * max(lengths) / max(work.lengths)
    return replace(
        work,
        units=work.units * ratio,
        load=sum(lengths) / max(lengths),
        lengths=tuple(lengths),
        scores=scores,
    )


def tokens_ratio(works: Sequence[Work], sizes: _Sizes) -> float:
    """Return the response tokens of a changed group relative to a recorded one."""
    if not sizes.group_size and not sizes.max_response_tokens:
        return 1.0
    changed = sum(sum(work.lengths) for work in changed_works(works, sizes))
    return changed / sum(sum(work.lengths) for work in works)
