"""Facts about how a generator makes a group from samples, with a scripted engine and scorer."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from composing import compose

from async_rl.config.run import RunConfig
from async_rl.core.errors import EngineDead, RewardError, Unavailable, WeightsError, root_cause
from async_rl.core.types import (
    CodeProblem,
    Group,
    Prompt,
    Purpose,
    Sampling,
    Score,
    StepScore,
    Ticket,
)
from async_rl.generation.engine import Engine
from async_rl.observability.activity import Activity
from async_rl.processes.generator import import_engine
from async_rl.protocol.buffer import FailGroup
from async_rl.protocol.generator import Completion
from async_rl.protocol.membership import Member, Members
from async_rl.rollouts.groups import Groups
from async_rl.rollouts.rollout import Rollouts
from async_rl.runtime.directory import Directory


class Letters:
    """Decodes token k as k letters "a"."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "a" * sum(int(i) for i in ids)


class ScriptedEngine:
    """Sample i has i + 1 tokens of value 2; a greedy one has a single token of value 9."""

    version = 3

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], num_samples: int, sampling: Sampling
    ) -> AsyncGenerator[Completion, None]:
        for index in range(num_samples):
            ids = [9] if sampling.temperature == 0 else [2] * (index + 1)
            n = len(ids)
            yield Completion(
                index=index,
                token_ids=np.array(ids, np.int32),
                logprobs=np.zeros(n, np.float32),
                versions=np.full(n, 3, np.int32),
                is_truncated=False,
            )


class ScriptedScorer:
    """The reward is the number of letters, at most 6; as steps: one per two letters."""

    async def close(self) -> None:
        pass

    async def score(self, prompt: Prompt, text: str, sample: object) -> Score:
        return Score(reward=float(min(len(text), 6)), parts={}, verdicts=(), latency_s=0.0)

    async def score_steps(
        self,
        prompt: Prompt,
        text: str,
        *,
        num_tokens: int,
        tokens_until: Callable[[int], int],
        sample: object,
    ) -> Score:
        steps = tuple(
            StepScore(end_tokens=tokens_until(chars), reward=1.0) for chars in (1, 2, 3, 99)
        )
        return Score(reward=1.0, parts={}, verdicts=(), latency_s=0.0, steps=steps)


def scripted_rollouts(config: RunConfig) -> Rollouts:
    return Rollouts(
        config,
        tokenizer=Letters(),
        token="t",
        name="generator-0",
        activity=Activity(),
        maker=None,
    )


def scripted_groups(context: Any, engine: Any = None) -> tuple[Groups, Rollouts]:
    rollouts = scripted_rollouts(context.config)
    engine = engine or ScriptedEngine()
    groups = Groups(context, rollouts, engine=lambda: engine, limit=asyncio.timeout)
    return groups, rollouts


def ticket_of(num_samples: int, purpose: Purpose = Purpose.TRAIN) -> Ticket:
    return Ticket(
        group_id=1,
        attempt=1,
        purpose=purpose,
        prompt=Prompt(
            prompt_id="p",
            text="",
            token_ids=np.zeros(2, np.int32),
            data_source="code",
            problem=CodeProblem(tests=[]),
        ),
        num_samples=num_samples,
        sampling=Sampling(temperature=1.0, max_new_tokens=8),
        admitted_version=3,
    )


class DeadEngine(ScriptedEngine):
    """An engine that fails every request in the given way."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], num_samples: int, sampling: Sampling
    ) -> AsyncGenerator[Completion, None]:
        if num_samples:
            raise self._error
        yield


def roll_out(
    monkeypatch: pytest.MonkeyPatch, *overrides: str, purpose: Purpose = Purpose.TRAIN
) -> Group:
    config = compose("grpo_code", ["generation.group_size=2", *overrides])
    num_samples = config.evaluation.num_samples
    if purpose is Purpose.TRAIN:
        num_samples = config.generation.generation_size or 2
    ticket = ticket_of(num_samples, purpose)

    async def run() -> Group:
        rollouts = scripted_rollouts(config)
        rollouts._scorer = ScriptedScorer()  # type: ignore[assignment]
        told: list[str] = []
        group = await rollouts.group(
            ticket,
            ScriptedEngine(),
            written=lambda: told.append("written"),  # type: ignore[arg-type]
        )
        assert told == ["written"]
        await rollouts.close()
        return group

    return asyncio.run(run())


def test_all_samples_are_kept_where_no_more_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    group = roll_out(monkeypatch)
    assert [t.score.reward for t in group.trajectories] == [2.0, 4.0]
    assert group.baseline is None


def test_each_sample_has_the_moments_of_its_last_token_and_its_score(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = roll_out(monkeypatch, "recording=times")
    for first_s, written_s, scored_s in (sample.clock for sample in group.trajectories):
        assert math.isnan(first_s)  # this engine does not say
        assert 0 <= written_s <= scored_s < 5
    assert abs(group.started_s - time.time()) < 60
    assert [t.clock for t in roll_out(monkeypatch, "recording=off").trajectories] == [(), ()]


@pytest.mark.covers("group_size, generation_size")
def test_of_more_samples_the_best_are_kept_and_of_equals_the_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = roll_out(monkeypatch, "generation.generation_size=5")
    # rewards 2, 4, 6, 6, 6: the two longest of the three that are worth 6
    assert [(t.score.reward, t.response_length) for t in group.trajectories] == [(6.0, 4), (6.0, 5)]


def test_an_evaluation_keeps_every_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    group = roll_out(monkeypatch, "evaluation.num_samples=4", purpose=Purpose.EVAL)
    assert [t.score.reward for t in group.trajectories] == [2.0, 4.0, 6.0, 6.0]


@pytest.mark.covers("greedy and sampled evaluation")
def test_an_evaluation_adds_one_greedy_answer_to_several_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_one, without = (
        roll_out(monkeypatch, f"evaluation.num_samples={count}", purpose=Purpose.EVAL)
        for count in (2, 1)
    )
    assert with_one.baseline is not None
    assert with_one.baseline.token_ids.tolist() == [0, 0, 9]
    assert without.baseline is None
    assert (len(with_one.trajectories), len(without.trajectories)) == (2, 1)


def test_remax_adds_one_scored_greedy_answer_that_is_no_member_of_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = roll_out(monkeypatch, "algorithm=remax")
    assert group.baseline is not None
    assert group.baseline.token_ids.tolist() == [0, 0, 9]
    assert group.baseline.score.reward == 6.0
    assert len(group.trajectories) == 2
    assert roll_out(monkeypatch, "algorithm=remax", purpose=Purpose.EVAL).baseline is None


def test_a_step_ends_with_the_token_that_completes_its_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    knobs = (
        "reward.placement=steps",
        "reward.mode=fraction",
    )
    group = roll_out(monkeypatch, *knobs)
    # two letters per token: characters 1 and 2 are token 1, character 3 is token 2; beyond the end
    # stands for the last token
    assert [s.end_tokens for s in group.trajectories[1].score.steps] == [1, 1, 2, 2]
    assert all(not t.score.steps for t in roll_out(monkeypatch).trajectories)


@pytest.mark.parametrize(("algorithm", "room"), [("grpo", 2), ("remax", 2)])
def test_room_counts_the_samples_that_are_being_written_and_remax_s_greedy_one(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, room: int
) -> None:
    overrides = [
        f"algorithm={algorithm}",
        "generation.group_size=2",
        "generation.max_concurrent_groups=4",
    ]
    context: Any = SimpleNamespace(
        config=compose("grpo_code", overrides),
        model_path=None,
        token="t",
        activity=Activity(),
        peer=lambda _: None,
    )

    async def rooms() -> list[int]:
        groups, rollouts = scripted_groups(context)
        samples = 3 if algorithm == "remax" else 2
        groups._num_writing = {1: samples, 2: samples}
        found = [groups._room()]
        groups._num_writing[3] = (
            1  # an evaluation's single sample takes a group's place once it is begun
        )
        found.append(groups._room())
        groups._num_writing.clear()
        found.append(groups._room())
        await rollouts.close()
        return found

    assert asyncio.run(rooms()) == [room, room - 1, 4]


@pytest.mark.parametrize("stop_on", ["[]", "[function_failure]"])
def test_a_reward_function_that_fails_gives_the_group_back_or_ends_the_generator(
    monkeypatch: pytest.MonkeyPatch, stop_on: str
) -> None:
    told: list[FailGroup] = []

    async def call(request: FailGroup, *, timeout_s: float) -> None:
        told.append(request)

    async def not_an_outage(failure: BaseException) -> bool:
        return False

    async def failing(ticket: Ticket, engine: Engine, *, written: Callable[[], None]) -> Group:
        raise ExceptionGroup("scoring", [RewardError("mine raised ValueError")])

    context: Any = SimpleNamespace(
        config=compose("grpo_code", [f"reward.stop_on={stop_on}"]), model_path=None,
        token="t", name="generator-0",
        activity=Activity(), log=logging.getLogger("test"),
        peer=lambda _: SimpleNamespace(call=call),
    )  # fmt: skip

    async def run() -> None:
        groups, rollouts = scripted_groups(context)
        rollouts.group = failing  # type: ignore[method-assign]
        rollouts.is_outage = not_an_outage  # type: ignore[method-assign]
        try:
            await groups._roll_out(SimpleNamespace(group_id=7, attempt=2))  # type: ignore[arg-type]
        finally:
            await rollouts.close()

    if stop_on != "[]":
        with pytest.raises(ExceptionGroup):
            asyncio.run(run())
        assert told == []
    else:
        asyncio.run(run())
        assert [(f.group_id, f.attempt, f.reason, f.message) for f in told] == [
            (7, 2, "reward_failed", "RewardError: mine raised ValueError")
        ]


@pytest.mark.parametrize("error", [Unavailable("the engine died"), WeightsError("half loaded")])
def test_an_engine_that_died_ends_its_generator_and_fails_no_group(error: Exception) -> None:
    """Further groups would fail too, and each would count as an attempt of its prompt."""
    told: list[object] = []

    async def call(request: object, *, timeout_s: float) -> None:
        told.append(request)

    context: Any = SimpleNamespace(
        config=compose("grpo_code", ["generation.group_size=2"]), model_path=None,
        token="t", name="generator-0",
        activity=Activity(), log=logging.getLogger("test"),
        peer=lambda _: SimpleNamespace(call=call),
    )  # fmt: skip

    async def run() -> None:
        groups, rollouts = scripted_groups(context, DeadEngine(error))
        try:
            await groups._roll_out(ticket_of(2))
        finally:
            await rollouts.close()

    with pytest.raises((EngineDead, ExceptionGroup)) as ended:
        asyncio.run(run())
    assert isinstance(root_cause(ended.value), EngineDead)
    assert told == []


def test_an_engine_is_brought_up_gently_where_another_generator_writes_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    niceness: list[int] = []

    def opener(*_: object, rank: int) -> None:
        niceness.append(os.getpriority(os.PRIO_PROCESS, 0))

    monkeypatch.setattr("async_rl.processes.generator.engine_opener", opener)

    async def run() -> None:
        other = Member(
            name="x",
            role="generator",
            pid=1,
            address="a",
            state="",
            waits_for="",
            since_s=0,
            version=0,
            counters={},
        )
        for members in ([], [msgspec.structs.replace(other, role="learner")], [other]):
            directory = Directory()
            directory.update(Members(revision=0, members=members))
            await import_engine(
                SimpleNamespace(
                    config=compose("grpo_code"),
                    model_path=None,
                    name="generator-1",
                    directory=directory,
                )
            )  # type: ignore[arg-type]

    asyncio.run(run())
    assert niceness[0] == niceness[1] < niceness[2]
