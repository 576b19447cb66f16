"""Which prompts leave the training data because they have become too easy, or stayed too hard.

At the start of each epoch every active prompt is judged by the mean reward, scaled as the learner
scales it, of its newest group that has come back. Nobody waits for groups that are still generated:
such a prompt is judged by the group before, or an epoch later. Invariants: at most floor(active x
max_share) prompts leave at one time, those farthest beyond their bound first; a prompt that left
stays away; a decision is given to the caller, who stores it before anything follows from it. Called
by buffer/service.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from async_rl.config.run import RunConfig
from async_rl.data.order import PromptOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaver:
    """A prompt that leaves: its index among the training prompts, where it came last, and its mean
    reward.
    """

    index: int
    position: int
    score: float


class ScoreFilter:
    """Scores of the prompts, and the rule by which they leave `order`."""

    def __init__(self, config: RunConfig, order: PromptOrder) -> None:
        self._filter = config.data.filter
        self._reward = config.reward
        self._order = order
        self._scores: dict[int, tuple[int, float]] = {}

    @property
    def is_on(self) -> bool:
        """Whether any prompt can leave."""
        return self._filter.above is not None or self._filter.below is not None

    def restore(
        self,
        left: Iterable[tuple[int, Sequence[int]]],
        rewards: Iterable[tuple[int, Sequence[float]]],
    ) -> None:
        """Takes over what the store knows. left: (position, indices), oldest first; rewards:
        (position, those of the samples).
        """
        for position, indices in left:
            self._order.remove(indices, position)
        for position, values in rewards:
            self.note(position, values)

    def note(self, position: int, rewards: Sequence[float]) -> None:
        """The group at this position of the order came back with these rewards."""
        if not self.is_on:
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
        if not self.is_on or not self._order.may_lose_at(position):
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
        return [
            Leaver(index=i, position=self._scores[i][0], score=self._scores[i][1]) for i in chosen
        ]

    def _excess(self, score: float) -> float:
        """How far the score is beyond the bound it breaks; not above 0 if it breaks none."""
        above, below = self._filter.above, self._filter.below
        return max(
            score - above if above is not None else 0.0, below - score if below is not None else 0.0
        )
