"""The prompts and tickets of groups: a group has an index, a ticket the prompt with this index.

Prompts may leave the training data at the start of a pass over it (data.filter); the order of
prompts changes here, before the first prompt of that pass is read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from async_rl.buffer.changes import Admitted, PromptsLeft
from async_rl.buffer.checks import check_trajectory
from async_rl.buffer.groups import OpenGroup, Recovered
from async_rl.config.run import RunConfig
from async_rl.config.sampling import num_drawn, sampling_of
from async_rl.core.errors import ProtocolError
from async_rl.core.types import Group, Purpose, Ticket
from async_rl.data.run_prompts import RunPrompts
from async_rl.data.score_filter import ScoreFilter


class Tickets:
    """The prompts of one run. Raises ProtocolError if open groups had other prompts."""

    def __init__(self, config: RunConfig, prompts: RunPrompts, recovered: Recovered) -> None:
        self._config = config
        self._prompts = prompts
        self._filter = ScoreFilter(config, prompts, recovered.left, recovered.rewards)
        for group in recovered.open:
            expected = recovered.prompt_ids[group.group_id]
            prompt_id = prompts.prompt(group.purpose, group.index).prompt_id
            if prompt_id != expected:
                raise ProtocolError(
                    f"group {group.group_id} was issued for prompt {expected}, but the data now has"
                    f" {prompt_id} at its position; resume with the data and the seed that the run"
                    " started with"
                )

    @property
    def num_held_out(self) -> int:
        """Prompts of one evaluation."""
        return self._prompts.num_held_out

    def admitted(self, group: OpenGroup) -> Admitted:
        """The change that records a new group."""
        return Admitted(
            group=group,
            prompt=self._prompts.prompt(group.purpose, group.index),
            num_samples=self._num_samples(group.purpose),
        )

    def ticket(self, group: OpenGroup) -> Ticket:
        """The ticket of a generating group."""
        num_samples = self._num_samples(group.purpose)
        if group.purpose is Purpose.TRAIN:
            # More may be drawn than are trained: the generator keeps the best (generation_size).
            num_samples = num_drawn(self._config.generation)
        return Ticket(
            group_id=group.group_id,
            attempt=group.attempt,
            purpose=group.purpose,
            prompt=self._prompts.prompt(group.purpose, group.index),
            num_samples=num_samples,
            sampling=sampling_of(self._config, group.purpose),
            admitted_version=group.version,
        )

    def check(self, group: Group, known: OpenGroup, *, newest_version: int) -> None:
        """Raise ProtocolError if the group is not a valid result of its ticket.

        newest_version: as in `check_trajectory`.
        """
        prompt = self._prompts.prompt(known.purpose, known.index)
        check = functools.partial(
            check_trajectory,
            prompt=prompt.token_ids,
            newest_version=newest_version,
            vocabulary_size=self._prompts.vocabulary_size,
        )
        expected = (known.purpose, prompt.prompt_id, self._num_samples(known.purpose))
        actual = (group.purpose, group.prompt_id, len(group.trajectories))
        if actual != expected:
            raise ProtocolError(f"purpose, prompt and samples are {actual} instead of {expected}")
        # A group that waits again may still come from the generator that was given up.
        if known.generator not in ("", group.generator):
            raise ProtocolError(f"its ticket is with {known.generator}")
        if not 0 <= group.generation_s < math.inf:
            raise ProtocolError(f"its generation took {group.generation_s} s")
        for index, sample in enumerate(group.trajectories):
            try:
                check(sample)
            except ProtocolError as error:
                raise ProtocolError(f"sample {index}: {error}") from error
        if group.baseline is not None:
            check(group.baseline)

    def note_rewards(self, index: int, group: Group) -> None:
        """Record the rewards of a training group for data.filter."""
        self._filter.note(index, [sample.score.reward for sample in group.trajectories])

    def remove_at(self, index: int) -> Sequence[PromptsLeft]:
        """Remove prompts from the data (data.filter) if this index starts a pass over the data."""
        leavers = self._filter.leavers_at(index)
        if not leavers:
            return []
        num_remaining = len(self._prompts.order.active)
        return [PromptsLeft(position=index, leavers=leavers, num_remaining=num_remaining)]

    def _num_samples(self, purpose: Purpose) -> int:
        """Samples of a complete group; more may be drawn for a training prompt."""
        if purpose is Purpose.TRAIN:
            return self._config.generation.group_size
        return self._config.evaluation.num_samples
