"""The filter that removes prompts from the training data that are too easy or too hard.

At the start of each epoch every active prompt is judged by the mean reward, scaled as the learner
scales it, of its newest complete group. The filter does not wait for groups in generation: such a
prompt is judged by its previous group, or an epoch later. Invariants: at most floor(active x
max_share) prompts are removed at one time, those farthest beyond their bound first; a removed
prompt never returns; a decision is returned to the caller, which stores it before it takes effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from async_rl.config.run import RunConfig
from async_rl.core.frozen import frozen
from async_rl.core.types import Purpose
from async_rl.data.run_prompts import RunPrompts


@frozen
class Leaver:
    """A prompt that leaves: its index among the training prompts, its id and its mean reward."""

    index: int
    prompt_id: str
    score: float


class ScoreFilter:
    """The scores of the prompts, and the rule for prompts to leave the order of `prompts`.

    left: (position, indices) of prompts that left before, oldest first.  rewards: (position, reward
    of each sample) of groups that were put before; read only if a filter is set.
    """

    def __init__(
        self,
        config: RunConfig,
        prompts: RunPrompts,
        left: Iterable[tuple[int, Sequence[int]]] = (),
        rewards: Iterable[tuple[int, Sequence[float]]] = (),
    ) -> None:
        self._filter = config.data.filter
        self._reward = config.reward
        self._prompts = prompts
        self._order = prompts.order
        self._scores: dict[int, tuple[int, float]] = {}
        self._is_on = self._filter.is_on
        for position, indices in left:
            self._order.remove(indices, position)
        if self._is_on:
            for position, values in rewards:
                self.note(position, values)

    def note(self, position: int, rewards: Sequence[float]) -> None:
        """The group at this position of the order came back with these rewards."""
        if not self._is_on:
            return
        reward = self._reward
        index = self._order.index(position)
        # As the objective scales them, so that the bounds mean the numbers that a person sees.
        scaled = (np.array(rewards) - reward.bias) * reward.scale
        clipped = scaled.clip(-reward.clip, reward.clip)
        newest, _ = self._scores.get(index, (-1, 0.0))
        # Groups come back in any order; an older one must not replace a newer score.
        if position > newest:
            self._scores[index] = position, float(clipped.mean())

    def leavers_at(self, position: int) -> list[Leaver]:
        """The prompts that leave before this position is issued; they are out of the order when
        this returns.
        """
        if not self._is_on or not self._order.may_lose_at(position):
            return []
        active = self._order.active
        excess = {}
        for index in active.tolist():
            if index in self._scores:
                _, score = self._scores[index]
                excess[index] = self._excess(score)
        beyond = [index for index, value in excess.items() if value > 0]
        # Equals are ordered by index, so that a resumed run decides the same.
        worst = sorted(beyond, key=lambda index: (-excess[index], index))
        # Without a prompt there would be no next step: the one nearest to its bound stays.
        chosen = worst[: min(int(len(active) * self._filter.max_share), len(active) - 1)]
        if chosen:
            self._order.remove(chosen, position)
        leavers = []
        for i in chosen:
            last_position, score = self._scores[i]
            prompt = self._prompts.prompt(Purpose.TRAIN, last_position)
            leavers.append(Leaver(index=i, prompt_id=prompt.prompt_id, score=score))
        return leavers

    def _excess(self, score: float) -> float:
        """Return how far the score is beyond a bound; at most 0 if it is within both."""
        above = self._filter.above
        below = self._filter.below
        excess = 0.0
        if above is not None:
            excess = score - above
        if below is not None:
            excess = max(excess, below - score)
        return excess
