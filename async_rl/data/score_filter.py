"""The filter that removes prompts from the training data that are too easy or too hard.

At the start of each epoch every active prompt is judged by the mean reward, scaled as the learner
scales it, of its newest complete group. The filter does not wait for groups in generation: such a
prompt is judged by its previous group, or an epoch later. Invariants: at most floor(active x
max_share) prompts are removed at one time, those farthest beyond their bound first; a removed
prompt never returns; a decision is returned to the caller, which stores it before it takes effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from async_rl.config.run import RunConfig
from async_rl.core.types import Purpose
from async_rl.data.run_prompts import RunPrompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaver:
    """A prompt that leaves: its index among the training prompts, its id and its mean reward."""

    index: int
    prompt_id: str
    score: float


class ScoreFilter:
    """The scores of the prompts, and the rule by which they leave the order of `prompts`.

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
        self._is_on = self._filter.above is not None or self._filter.below is not None
        for position, indices in left:
            self._order.remove(indices, position)
        if self._is_on:
            for position, values in rewards:
                self.note(position, values)

    def note(self, position: int, rewards: Sequence[float]) -> None:
        """The group at this position of the order came back with these rewards."""
        if not self._is_on:
            return
        reward, index = self._reward, self._order.index(position)
        scaled = [
            min(max((r - reward.bias) * reward.scale, -reward.clip), reward.clip) for r in rewards
        ]
        newest, _ = self._scores.get(index, (-1, 0.0))
        if position > newest:
            self._scores[index] = position, sum(scaled) / len(scaled)

    def leavers_at(self, position: int) -> list[Leaver]:
        """The prompts that leave before this position is issued; they are out of the order when
        this returns.
        """
        if not self._is_on or not self._order.may_lose_at(position):
            return []
        active = self._order.active
        judged = [
            (self._excess(self._scores[i][1]), i) for i in active.tolist() if i in self._scores
        ]
        worst = sorted(
            ((excess, i) for excess, i in judged if excess > 0),
            key=lambda pair: (-pair[0], pair[1]),
        )
        chosen = [i for _, i in worst[: int(len(active) * self._filter.max_share)]]
        if chosen:
            self._order.remove(chosen, position)
        leavers = []
        for i in chosen:
            last_position, score = self._scores[i]
            prompt = self._prompts.prompt(Purpose.TRAIN, last_position)
            leavers.append(Leaver(index=i, prompt_id=prompt.prompt_id, score=score))
        return leavers

    def _excess(self, score: float) -> float:
        """How far the score is beyond the bound it breaks; not above 0 if it breaks none."""
        above, below = self._filter.above, self._filter.below
        return max(
            score - above if above is not None else 0.0, below - score if below is not None else 0.0
        )
