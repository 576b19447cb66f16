"""A generator reports an outage only if a sample that was scored before fails too."""

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import pytest
from composing import compose
from rollouts_support import opened_rollouts, process, ticket_of
from test_generator_groups import ScriptedEngine, ScriptedScorer

from async_rl.core.errors import AgentError, BrokenTest, InfrastructureError, NotTaken, RewardError
from async_rl.core.types import Prompt, Score
from async_rl.protocol.buffer import FailGroup, RequestWork, Work
from async_rl.rollouts.groups import Groups


class FailingScorer(ScriptedScorer):
    """Fails for prompts whose id is in `bad`; all of them if that is None."""

    def __init__(self, bad: set[str] | None, error: Exception) -> None:
        self.bad = bad
        self._error = error

    async def score(self, prompt: Prompt, text: str, sample: object) -> Score:
        if self.bad is None or prompt.prompt_id in self.bad:
            # A new one each time: an error that is raised again keeps all its tracebacks.
            raise type(self._error)(*self._error.args)
        return await super().score(prompt, text, sample)


async def roll_out(
    scorer: FailingScorer, *prompts: str, settings: Sequence[str] = ()
) -> tuple[list[str], str]:
    """Roll out these prompts; after the one that is called down, nothing can be scored. Return the
    reasons of the failures, and what the generator waits for at its next request for work.
    """
    reasons: list[str] = []
    waits: list[str] = []

    async def call(request: Any, **_: float) -> Any:
        match request:
            case FailGroup():
                reasons.append(request.reason)
            case RequestWork():
                waits.append(context.activity.snapshot().waits_for)
        return Work(tickets=[])

    config = compose("grpo_code", ["generation.group_size=2", *settings])
    context = process(config, call)
    async with opened_rollouts(config, scorer, activity=context.activity) as rollouts:
        groups = Groups(context, rollouts, engine=ScriptedEngine, limit=asyncio.timeout)
        for prompt_id in prompts:
            await groups.roll_out(ticket_of(2, prompt_id=prompt_id))
            if prompt_id == "down":
                scorer.bad = None
        await groups.request_work(1)
    return reasons, waits[0]


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
    assert asyncio.run(roll_out(FailingScorer(bad, error), *prompts))[0] == reasons


def test_a_generator_in_an_outage_says_what_holds_it_back_until_a_group_is_scored() -> None:
    error = RewardError("http://judge gave no score\nin 3 attempts")
    _, waits_for = asyncio.run(roll_out(FailingScorer({"poison"}, error), "poison"))
    assert waits_for == "scoring: http://judge gave no score in 3 attempts"
    reasons, waits_for = asyncio.run(roll_out(FailingScorer({"poison"}, error), "poison", "good"))
    assert reasons == ["scoring_outage"]
    assert waits_for == "admission: the learner is behind"


def test_a_function_that_always_fails_ends_the_run_with_its_reason() -> None:
    scorer = FailingScorer(None, RewardError("mine raised KeyError: 'level' (/task.py:3)"))
    last = r"20 groups in a row .* KeyError: 'level' \(/task.py:3\)"
    with pytest.raises(RewardError, match=last):
        asyncio.run(roll_out(scorer, *["any"] * 20))
    assert len(asyncio.run(roll_out(scorer, *["any"] * 19))[0]) == 19


@pytest.mark.parametrize(
    ("error", "reason", "told"),
    [
        (AgentError("mine raised\nKeyError"), "agent_failed", "AgentError: mine raised KeyError"),
        (KeyError("level"), "generation_failed", r"KeyError: 'level' \(/.*_outage\.py:\d+\)"),
    ],
)
def test_what_always_fails_costs_no_prompts(error: Exception, reason: str, told: str) -> None:
    """An agent, or a rollout function."""
    scorer = FailingScorer({"any"}, error)
    # The first one is scored, and can be scored again: this is no outage of the scorer.
    reasons, waits_for = asyncio.run(roll_out(scorer, "good", *["any"] * 66))
    assert reasons == [reason] * 64 + ["scoring_outage"] * 2
    assert re.fullmatch(f"every group fails: {told}", waits_for)
    reasons, _ = asyncio.run(roll_out(scorer, *["good", *["any"] * 64] * 2))
    assert reasons == [reason] * 128


@pytest.mark.parametrize(
    ("error", "settings", "reason"),
    [
        (NotTaken("no program took it"), (), "not_taken"),
        (InfrastructureError("no verifier answers"), (), "scoring_outage"),
        (
            RewardError("http://judge gave no score"),
            ("reward.terms.judge=remote", "reward.terms.judge.url=http://judge"),
            "scoring_outage",
        ),
    ],
)
def test_what_may_come_back_is_waited_for(
    error: Exception, settings: Sequence[str], reason: str
) -> None:
    reasons, _ = asyncio.run(roll_out(FailingScorer(None, error), *["any"] * 66, settings=settings))
    assert reasons == [reason] * 66
