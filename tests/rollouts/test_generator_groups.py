"""Facts about how a generator makes a group from samples, with a scripted engine and scorer."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec
import pytest
from composing import compose
from rollouts_support import completion, opened_rollouts, process, score, ticket_of

from async_rl.core.errors import EngineDead, RewardError, Unavailable, WeightsError, root_cause
from async_rl.core.types import Group, Prompt, Purpose, Sampling, Score, StepScore, Ticket
from async_rl.protocol.base import Ok
from async_rl.protocol.buffer import RequestWork, Work
from async_rl.protocol.generator import Completion
from async_rl.rollouts.groups import Groups


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


def roll_out(*overrides: str, purpose: Purpose = Purpose.TRAIN) -> Group:
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
    group = roll_out(*overrides, purpose=purpose)
    assert [(one.score.reward, one.response_length) for one in group.trajectories] == kept
    assert (group.baseline is not None) is has_greedy
    if group.baseline is not None:
        assert group.baseline.token_ids.tolist() == [1, 2, 26]
        assert group.baseline.score.reward == 6.0


def test_each_sample_has_the_moments_of_its_last_token_and_its_score() -> None:
    group = roll_out("recording=times")
    for first_s, written_s, scored_s in (sample.clock for sample in group.trajectories):
        assert math.isnan(first_s)  # this engine does not say
        assert 0 <= written_s <= scored_s < 5
    assert [t.clock for t in roll_out("recording=off").trajectories] == [(), ()]


def test_a_step_ends_with_the_token_that_completes_its_text() -> None:
    group = roll_out("reward.placement=steps", "reward.mode=fraction")
    # A position beyond the end stands for the last token.
    assert [step.end_tokens for step in group.trajectories[1].score.steps] == [1, 2, 2]
    assert all(not sample.score.steps for sample in roll_out().trajectories)


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


async def attempt(stop_on: str, engine: object, scorer: object) -> list[Any]:
    """Roll out one ticket; return the requests that the buffer gets."""
    config = compose("grpo_code", ["generation.group_size=2", f"reward.stop_on={stop_on}"])
    requests: list[Any] = []

    async def call(request: Any, **_: float) -> Ok:
        requests.append(request)
        return Ok()

    async with opened_rollouts(config, scorer) as rollouts:
        context = process(config, call)
        groups = Groups(context, rollouts, engine=lambda: engine, limit=asyncio.timeout)  # type: ignore[arg-type,return-value]
        await groups.roll_out(ticket_of(2))
    return requests


class FailingScorer(ScriptedScorer):
    async def score(self, prompt: Prompt, text: str, sample: object) -> Score:
        # The control sample can be scored.
        if len(text) == 1:
            return await super().score(prompt, text, sample)
        raise RewardError("mine raised ValueError")


async def test_a_reward_function_that_fails_gives_the_group_back_or_ends_the_generator() -> None:
    (failure,) = await attempt("[]", ScriptedEngine(), FailingScorer())
    assert (failure.group_id, failure.attempt, failure.reason) == (1, 1, "reward_failed")
    assert failure.message == "RewardError: mine raised ValueError"
    with pytest.raises(ExceptionGroup) as ended:
        await attempt("[function_failure]", ScriptedEngine(), FailingScorer())
    assert isinstance(root_cause(ended.value), RewardError)


@pytest.mark.parametrize("error", [Unavailable("the engine died"), WeightsError("half loaded")])
async def test_an_engine_that_died_ends_its_generator_and_fails_no_group(error: Exception) -> None:
    """Further groups would fail too, and each would count as an attempt of its prompt."""
    with pytest.raises((ExceptionGroup, EngineDead)) as ended:
        await attempt("[]", ScriptedEngine(error), ScriptedScorer())
    assert isinstance(root_cause(ended.value), EngineDead)
