"""What the learner says about where it stands in the history of the run: where it starts from, what need not be kept any more.

Part of the protocol of `messages.py`, with the same invariants.
"""

from __future__ import annotations

from typing import ClassVar

from async_rl.messages import Message, Ok
from async_rl.types import FloatArray


class StartFrom(Message):
    """learner -> supervisor: the learner starts at `version`; numbers of later steps belong to a history that is given up."""

    Reply: ClassVar[type] = Ok
    version: int


class KeepAdvantages(Message):
    """learner -> buffer: what the step made of each response token of these groups, all samples of a group in one row; for people."""

    Reply: ClassVar[type] = Ok
    group_ids: list[int]
    rows: list[FloatArray]


class EvaluationScores(Message):
    """Share of held-out prompts solved, by version; finished evaluations only."""

    pass_rates: dict[int, float]


class GetEvaluationScores(Message):
    """learner -> buffer: how good were the versions?"""

    Reply: ClassVar[type] = EvaluationScores


class ForgetBefore(Message):
    """learner -> buffer: nobody will go back to a version before this one; trajectories that only that would need may go."""

    Reply: ClassVar[type] = Ok
    version: int
