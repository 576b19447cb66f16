"""A generator reports an outage only if a sample that was scored before fails too."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from composing import compose
from test_generator_groups import ScriptedScorer, scripted_groups, ticket_of

from async_rl.core.errors import BrokenTest, InfrastructureError, RewardError
from async_rl.core.types import Group, Prompt, Score
from async_rl.observability.activity import Activity
from async_rl.protocol.buffer import FailGroup, PutGroup, RequestWork, Work
from async_rl.rewards.scoring import Control


class FailingScorer(ScriptedScorer):
    """Fails for prompts whose id is in `bad`; all of them if that is None."""

    def __init__(self, bad: set[str] | None, error: Exception) -> None:
        self.bad = bad
        self._error = error

    async def score(self, prompt: Prompt, text: str, sample: object) -> Score:
        if self.bad is None or prompt.prompt_id in self.bad:
            raise self._error
        return await super().score(prompt, text, sample)


class Buffer:
    """Keeps what it is sent, and the activity at each request for work."""

    def __init__(self, activity: Activity) -> None:
        self.failed: list[tuple[str, str]] = []
        self.put: list[Group] = []
        self.waits: list[str] = []
        self._activity = activity

    async def call(self, request: Any, *, timeout_s: float) -> Any:
        match request:
            case FailGroup():
                self.failed.append((request.reason, request.message))
            case PutGroup():
                self.put.append(request.group)
            case RequestWork():
                self.waits.append(self._activity.snapshot().waits_for)
        return Work(tickets=[])


async def roll_out(scorer: FailingScorer, *prompts: str, words: Sequence[str] = ()) -> Buffer:
    """Roll out these prompts; after the one that is called down, nothing can be scored."""
    activity = Activity()
    buffer = Buffer(activity)
    context: Any = SimpleNamespace(
        config=compose("grpo_code", ["generation.group_size=2", *words]),
        model_path=None, token="t", name="generator-0", incarnation="a", version=0,
        activity=activity, log=logging.getLogger("test"), peer=lambda _: buffer,
    )  # fmt: skip
    groups, rollouts = scripted_groups(context)
    rollouts._scorer = scorer  # type: ignore[assignment]
    rollouts._control = Control(scorer, limit_s=1.0)  # type: ignore[arg-type]
    try:
        for prompt_id in prompts:
            ticket = ticket_of(2)
            prompt = msgspec.structs.replace(ticket.prompt, prompt_id=prompt_id)
            await groups._roll_out(msgspec.structs.replace(ticket, prompt=prompt))
            if prompt_id == "down":
                scorer.bad = None
        await groups._request_work(1)
    finally:
        await rollouts.close()
    return buffer


@pytest.mark.parametrize(
    ("error", "bad", "prompts", "reasons"),
    [
        (RewardError("x"), {"poison"}, ("good", "poison"), ["reward_failed"]),
        (InfrastructureError("x"), {"poison"}, ("good", "poison"), ["scoring_failed"]),
        (RewardError("x"), set(), ("down", "good"), ["scoring_outage"]),
        (InfrastructureError("x"), set(), ("down", "good"), ["scoring_outage"]),
        (RewardError("x"), None, ("good", "good"), ["scoring_outage"] * 2),
        (BrokenTest("x"), {"poison"}, ("poison",), ["reward_failed"]),
    ],
)
def test_only_a_failure_of_the_control_sample_is_an_outage(
    error: Exception, bad: set[str] | None, prompts: tuple[str, ...], reasons: list[str]
) -> None:
    buffer = asyncio.run(roll_out(FailingScorer(bad, error), *prompts))
    assert [reason for reason, _ in buffer.failed] == reasons


def test_a_generator_in_an_outage_says_what_holds_it_back() -> None:
    error = RewardError("http://judge gave no score\nin 3 attempts")
    buffer = asyncio.run(roll_out(FailingScorer(None, error), "any"))
    assert buffer.waits == ["scoring: http://judge gave no score in 3 attempts"]


def test_a_group_that_is_scored_ends_the_outage_for_its_generator() -> None:
    scorer = FailingScorer({"poison"}, InfrastructureError("x"))
    buffer = asyncio.run(roll_out(scorer, "poison", "good"))
    assert [reason for reason, _ in buffer.failed] == ["scoring_outage"]
    assert buffer.waits == ["admission: the learner is behind"]


def test_a_function_that_always_fails_ends_the_run_with_its_reason() -> None:
    error = RewardError("mine raised KeyError: 'level' (/task.py:3)")
    with pytest.raises(
        RewardError, match=r"20 groups in a row .* KeyError: 'level' \(/task.py:3\)"
    ):
        asyncio.run(roll_out(FailingScorer(None, error), *["any"] * 20))
    assert len(asyncio.run(roll_out(FailingScorer(None, error), *["any"] * 19)).failed) == 19


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (InfrastructureError("no verifier answers"), ()),
        (
            RewardError("http://judge gave no score"),
            ("reward.terms.judge=remote", "reward.terms.judge.url=http://judge"),
        ),
    ],
)
def test_what_may_come_back_is_waited_for(error: Exception, words: Sequence[str]) -> None:
    buffer = asyncio.run(roll_out(FailingScorer(None, error), *["any"] * 25, words=words))
    assert [reason for reason, _ in buffer.failed] == ["scoring_outage"] * 25
