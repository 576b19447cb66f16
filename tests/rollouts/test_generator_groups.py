"""How a generator makes a group from samples, with a scripted engine and scorer. It reports an
outage only if a sample that was scored before fails too.
"""

import asyncio
import math
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from composing import compose
from learner_support import make_groups
from rollouts_support import completion, opened_rollouts, process, score, ticket_of

from async_rl.buffer.tickets import check_group
from async_rl.core.errors import (
    AgentError,
    BrokenTest,
    EngineDead,
    InfrastructureError,
    NotTaken,
    ProtocolError,
    RewardError,
    Unavailable,
    WeightsError,
    root_cause,
)
from async_rl.core.heads import pack_group, read_group
from async_rl.core.types import (
    Branch,
    Group,
    Prompt,
    Purpose,
    Sampling,
    Score,
    StepScore,
    Ticket,
    Trajectory,
)
from async_rl.launchers.commands.stored import response_text
from async_rl.protocol.buffer import FailGroup, RequestWork, Work
from async_rl.protocol.generator import Completion
from async_rl.rollouts.groups import Groups, with_common_prompt


class ScriptedEngine:
    """Sample i has i + 1 letters "b"; a greedy one has a single "z". error: of every request."""

    version = 3

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], num_samples: int, sampling: Sampling
    ) -> AsyncGenerator[Completion, None]:
        if self.error is not None:
            raise self.error
        for index in range(num_samples):
            ids = [26] if sampling.temperature == 0 else [2] * (index + 1)
            yield completion(*ids, index=index, version=3)


class ScriptedScorer:
    """The reward is twice the number of letters, at most 6, and 6 for a "z"."""

    async def close(self) -> None:
        pass

    async def score(self, prompt: Prompt, text: str, sample: object) -> Score:
        return score(6.0 if text == "z" else float(min(2 * len(text), 6)))

    async def score_steps(
        self,
        prompt: Prompt,
        text: str,
        *,
        num_tokens: int,
        tokens_until: Callable[[int], int],
        sample: object,
    ) -> Score:
        steps = tuple(StepScore(end_tokens=tokens_until(n), reward=1.0) for n in (1, 2, 99))
        return score(1.0, steps=steps)


def grouped(*overrides: str, purpose: Purpose = Purpose.TRAIN) -> Group:
    config = compose("grpo_code", ["generation.group_size=2", *overrides])
    num_samples = config.evaluation.num_samples
    if purpose is Purpose.TRAIN:
        num_samples = config.generation.generation_size or 2

    async def run() -> Group:
        calls: list[None] = []
        async with opened_rollouts(config, ScriptedScorer()) as rollouts:
            group = await rollouts.group(
                ticket_of(num_samples, purpose),
                ScriptedEngine(),
                written=lambda: calls.append(None),
            )
        assert len(calls) == 1
        return group

    return asyncio.run(run())


@pytest.mark.covers("group_size, generation_size")
@pytest.mark.covers("greedy and sampled evaluation")
@pytest.mark.parametrize(
    ("overrides", "purpose", "kept", "has_greedy"),
    [
        ([], Purpose.TRAIN, [(2, 1), (4, 2)], False),
        # Rewards 2, 4, 6, 6, 6: the two longest of three equals.
        (["generation.generation_size=5"], Purpose.TRAIN, [(6, 4), (6, 5)], False),
        (["algorithm=remax"], Purpose.TRAIN, [(2, 1), (4, 2)], True),
        (["algorithm=remax"], Purpose.EVAL, [(2, 1)], False),
        (["evaluation.num_samples=4"], Purpose.EVAL, [(2, 1), (4, 2), (6, 3), (6, 4)], True),
    ],
)
def test_the_samples_of_a_group_and_its_greedy_answer(
    overrides: list[str], purpose: Purpose, kept: list[tuple[float, int]], has_greedy: bool
) -> None:
    """Only training drops samples; a greedy answer is scored and no member of the group."""
    group = grouped(*overrides, purpose=purpose)
    assert [(one.score.reward, one.response_length) for one in group.trajectories] == kept
    assert (group.baseline is not None) is has_greedy
    if group.baseline is not None:
        assert group.baseline.token_ids.tolist() == [1, 2, 26]
        assert group.baseline.score.reward == 6.0


def test_each_sample_has_the_moments_of_its_last_token_and_its_score() -> None:
    group = grouped("recording=times")
    for first_s, written_s, scored_s in (sample.clock for sample in group.trajectories):
        assert math.isnan(first_s)  # this engine does not say
        assert 0 <= written_s <= scored_s < 5
    assert [t.clock for t in grouped("recording=off").trajectories] == [(), ()]


def test_a_step_ends_with_the_token_that_completes_its_text() -> None:
    group = grouped("reward.placement=steps", "reward.mode=fraction")
    # A position beyond the end stands for the last token.
    assert [step.end_tokens for step in group.trajectories[1].score.steps] == [1, 2, 2]
    assert all(not sample.score.steps for sample in grouped().trajectories)


@pytest.mark.parametrize("algorithm", ["grpo", "remax"])
async def test_room_counts_the_samples_that_are_written(algorithm: str) -> None:
    """The engine has room for 4 groups; only the first two and a part of the third are written."""
    config = compose(
        "grpo_code",
        [f"algorithm={algorithm}", "generation.group_size=2", "generation.max_concurrent_groups=4"],
    )
    credits: list[int] = []

    class Rollouts:
        async def group(self, ticket: Ticket, engine: object, *, written: Any) -> Group:
            # The writing of the last group of each answer ends; all wait for their scores.
            if ticket.group_id in (3, 4):
                written()
            await asyncio.Event().wait()
            raise AssertionError

    is_full = asyncio.Event()

    async def call(request: RequestWork, *, wait_s: float) -> Work:
        credits.append(request.credit)
        if len(credits) == 3:
            is_full.set()
            await asyncio.Event().wait()
        # Two single samples of an evaluation take the place of one group.
        sizes = {1: 2, 2: 2, 3: 2, 4: 2} if len(credits) == 1 else {5: 1, 6: 1}
        purposes = {1: Purpose.EVAL, 2: Purpose.TRAIN}
        new = {number: ticket_of(size, purposes[size]) for number, size in sizes.items()}
        return Work(tickets=[msgspec.structs.replace(it, group_id=n) for n, it in new.items()])

    groups = Groups(
        process(config, call),
        Rollouts(),  # type: ignore[arg-type]
        engine=ScriptedEngine,
        limit=asyncio.timeout,
    )
    groups.weights_loaded()
    making = asyncio.create_task(groups.make())
    async with asyncio.timeout(30):
        await is_full.wait()
    making.cancel()
    await asyncio.gather(making, return_exceptions=True)
    assert credits == [4, 2, 1]


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
    scorer: FailingScorer, *prompts: str, settings: Sequence[str] = (), error: Any = None
) -> tuple[list[str], str]:
    """Roll out these prompts; after the one that is called down, nothing can be scored. Return the
    reasons of the failures, and what the generator waits for at its next request for work. error:
    of the engine.
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
        engine = ScriptedEngine(error)
        groups = Groups(context, rollouts, engine=lambda: engine, limit=asyncio.timeout)  # type: ignore[arg-type,return-value]
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
        (KeyError("level"), "generation_failed", r"KeyError: 'level' \(/.*_groups\.py:\d+\)"),
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


def test_a_function_that_fails_ends_the_run_that_wants_it() -> None:
    scorer = FailingScorer({"poison"}, RewardError("mine raised"))
    settings = ["reward.stop_on=[function_failure]"]
    with pytest.raises(ExceptionGroup) as ended:
        asyncio.run(roll_out(scorer, "good", "poison", settings=settings))
    assert isinstance(root_cause(ended.value), RewardError)


@pytest.mark.parametrize("error", [Unavailable("the engine died"), WeightsError("half loaded")])
def test_an_engine_that_died_ends_its_generator_and_fails_no_group(error: Exception) -> None:
    """Further groups would fail too, and each would count as an attempt of its prompt."""
    with pytest.raises((ExceptionGroup, EngineDead)) as ended:
        asyncio.run(roll_out(FailingScorer(set(), error), "good", error=error))
    assert isinstance(root_cause(ended.value), EngineDead)


PROMPT = [1, 2]


def sample(read: list[int], branches: tuple[Branch, ...] = ((2, -1),)) -> Trajectory:
    """Reads, writes two tokens, and reads and writes one more."""
    steps = (StepScore(end_tokens=2 + len(read), reward=1.0),)
    is_written = np.array([0] * (2 + len(read)) + [1, 1, 0, 1], bool)
    return Trajectory(
        token_ids=np.array([*PROMPT, *read, 40, 41, 42, 43], np.int32),
        prompt_length=2,
        loss_mask=is_written,
        behavior_logprobs=np.where(is_written, -1, 0).astype(np.float32),
        versions=np.where(is_written, 0, -1).astype(np.int32),
        is_truncated=False,
        score=Score(reward=1.0, parts={}, verdicts=(), latency_s=0.0, steps=steps),
        branches=branches,
    )


def checked(samples: list[Trajectory]) -> list[Trajectory]:
    """The samples as the buffer accepts them."""
    group = msgspec.structs.replace(make_groups(1)[0], trajectories=samples)
    packed = read_group(pack_group(group))
    check_group(packed, np.array(PROMPT, np.int32), newest_version=0, vocabulary_size=50)
    return packed.unpacked().trajectories


@pytest.mark.parametrize(
    ("samples", "prompt"),
    [
        ([sample([5, 6, 7]), sample([5, 6, 8])], [1, 2, 5, 6]),
        ([sample([5, 6, 7], ()), sample([5, 6, 8], ())], [1, 2, 5, 6]),
        ([sample([5, 6, 7])], [1, 2, 5, 6, 7]),
        ([sample([5, 6, 7]), sample([9, 6, 8])], PROMPT),
        # One of them continues the prompt.
        ([sample([5, 6, 7]), sample([5, 6, 8], ())], PROMPT),
        # A further branch begins there.
        ([sample([5, 6, 7], ((2, -1), (4, 2))), sample([5, 6, 7])], [1, 2, 5, 6]),
    ],
)
def test_what_all_read_first_is_their_prompt(samples: list[Trajectory], prompt: list[int]) -> None:
    for before, after in zip(samples, checked(with_common_prompt(samples)), strict=True):
        assert after.token_ids[: after.prompt_length].tolist() == prompt
        (step,), (step_before,) = after.score.steps, before.score.steps
        assert step.end_tokens + after.prompt_length == step_before.end_tokens + 2
        if before.branches:
            # A person sees all that the agent read.
            assert response_text(after, str) == response_text(before, str)
        fields = ("token_ids", "loss_mask", "behavior_logprobs", "versions")
        assert all(np.array_equal(getattr(before, f), getattr(after, f)) for f in fields)
        assert after.branches == before.branches


def test_a_prompt_that_is_no_common_one_is_refused() -> None:
    one, other = with_common_prompt([sample([5, 6, 7]), sample([5, 6, 8])])
    changed = [one, msgspec.structs.replace(other, branches=((3, -1),))]
    with pytest.raises(ProtocolError, match="different branches"):
        checked(changed)
