"""Facts about samples in several turns: which tokens carry loss, what the limits cut, what is
judged and what people see.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from composing import compose, compose_unchecked
from rich.console import Console

from async_rl.config.checks.run import problems
from async_rl.config.plugins import load_rollout
from async_rl.core.errors import ConfigError
from async_rl.core.types import (
    NO_VERSION,
    CodeProblem,
    Group,
    IntArray,
    Prompt,
    Purpose,
    Sampling,
    Score,
    Ticket,
)
from async_rl.monitoring.rollout_page import page
from async_rl.observability.activity import Activity
from async_rl.protocol.generator import Completion
from async_rl.rollouts.conversation import Conversation, open_conversations
from async_rl.rollouts.rollout import Rollouts

WRITES = """
async def twice(talk):
    assert talk.row == {"wanted": 3}
    first = await talk.write()
    talk.tell("bcd")
    await talk.write(max_tokens=1)
    talk.tell("z")

async def chooses(talk):
    await talk.write()
    talk.tell("b")
    await talk.write()
    return "my answer"

async def endless(talk):
    while True:
        await talk.write()
        talk.tell("b")

async def says_too_much(talk):
    await talk.write()
    talk.tell("b" * 30)

async def silent(talk):
    return "nothing"

async def fails(talk):
    await talk.write()
    raise ZeroDivisionError("mine")

def plain(talk):
    return None
"""


class Alphabet:
    """Token k is the k-th letter; 0 ends and is no text."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(96 + int(i)) for i in ids if i)

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(letter) - 96 for letter in text if letter.isalpha()]}


class Parrot:
    """Turn k of a sample is the token 20 + k and an end, written by version 3 + k; it hears
    everything that came before.
    """

    version = 3

    def __init__(self) -> None:
        self.heard: dict[str, list[int]] = {}

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], num_samples: int, sampling: Sampling
    ) -> AsyncGenerator[Completion, None]:
        assert num_samples == 1
        self.heard[request_id] = list(prompt_token_ids)
        turn = int(request_id.rpartition(".")[2])
        ids = [20 + turn, 0][: sampling.max_new_tokens]
        yield Completion(
            index=0,
            token_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), -0.5 - turn, np.float32),
            versions=np.full(len(ids), 3 + turn, np.int32),
            is_truncated=len(ids) < 2,
        )


class Judge:
    def __init__(self) -> None:
        self.judged: list[str] = []

    async def score(self, prompt: Prompt, text: str, sample: Any) -> Score:
        made = sample()
        assert made.response == text
        self.judged.append(f"{text} of {made.transcript}: {made.is_written}")
        return Score(reward=1.0, parts={}, verdicts=(), latency_s=0.0)

    async def close(self) -> None:
        pass


def roll_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, *overrides: str
) -> tuple[Group, Judge, Parrot]:
    (tmp_path / "writes.py").write_text(WRITES)
    config = compose(
        "grpo_code",
        ["generation.group_size=2", f"rollout.fn={tmp_path}/writes.py:{function}", *overrides],
    )
    problem = CodeProblem(tests=[], row='{"wanted": 3}')
    ticket = Ticket(
        group_id=1, attempt=1, purpose=Purpose.TRAIN, num_samples=2, admitted_version=3,
        prompt=Prompt(prompt_id="p", text="a", token_ids=np.array([1, 1], np.int32),
        data_source="code", problem=problem),
        sampling=Sampling(temperature=1.0, max_new_tokens=8),
    )  # fmt: skip
    judge, parrot = Judge(), Parrot()

    async def run() -> Group:
        rollouts = Rollouts(
            config,
            tokenizer=Alphabet(),
            token="t",
            name="generator-0",
            activity=Activity(),
            maker=open_conversations(config, Alphabet()),
        )
        rollouts._scorer = judge  # type: ignore[assignment]
        try:
            return await rollouts.group(ticket, parrot, written=lambda: None)
        finally:
            await rollouts.close()

    return asyncio.run(run()), judge, parrot


def test_only_what_the_policy_wrote_is_trained_and_nothing_is_tokenized_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, judge, parrot = roll_out(tmp_path, monkeypatch, "twice")
    assert len(group.trajectories) == 2
    for sample in group.trajectories:
        assert sample.token_ids.tolist() == [
            1,
            1,
            20,
            0,
            2,
            3,
            4,
            21,
        ]  # the end token of the first turn stays; what was told last is gone
        assert sample.loss_mask.tolist() == [False, False, True, True, False, False, False, True]
        assert sample.behavior_logprobs.tolist() == [0, 0, -0.5, -0.5, 0, 0, 0, -1.5]
        assert sample.versions.tolist() == [
            NO_VERSION,
            NO_VERSION,
            3,
            3,
            NO_VERSION,
            NO_VERSION,
            NO_VERSION,
            4,
        ]
        # the oldest token of the policy, not of its context
        assert sample.versions[sample.loss_mask].min() == 3
        assert not sample.is_truncated  # the second turn was cut by the function, not by the limit
    assert judge.judged == ["u of tbcdu: [True, True, False, False, False, True]"] * 2
    assert parrot.heard["1.1.0.1"] == [1, 1, 20, 0, 2, 3, 4]


def test_the_function_may_say_what_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, judge, _ = roll_out(tmp_path, monkeypatch, "chooses")
    assert [line.partition(" of ")[0] for line in judge.judged] == ["my answer"] * 2


def test_a_sample_ends_cut_off_after_rollout_max_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for turns in (1, 2):
        group, _, _ = roll_out(tmp_path, monkeypatch, "endless", f"rollout.max_turns={turns}")
        assert [(t.response_length, t.is_truncated) for t in group.trajectories] == [
            (3 * turns - 1, True)
        ] * 2


def test_a_sample_never_has_more_tokens_than_data_max_response_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, _, _ = roll_out(tmp_path, monkeypatch, "endless")
    assert [(t.response_length, t.is_truncated) for t in group.trajectories] == [(8, True)] * 2
    group, _, _ = roll_out(tmp_path, monkeypatch, "says_too_much")
    assert [(t.response_length, t.is_truncated) for t in group.trajectories] == [(2, True)] * 2


def test_remax_leads_its_greedy_answer_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, _, _ = roll_out(tmp_path, monkeypatch, "twice", "algorithm=remax")
    assert group.baseline is not None
    assert group.baseline.token_ids.tolist() == group.trajectories[0].token_ids.tolist()


@pytest.mark.parametrize(
    ("function", "said"), [("silent", "before the policy wrote anything"), ("fails", "mine")]
)
def test_a_function_that_fails_fails_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, said: str
) -> None:
    with pytest.raises(ExceptionGroup) as failed:
        roll_out(tmp_path, monkeypatch, function)
    leaf: BaseException = failed.value
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    assert said in str(leaf)


def test_a_function_that_cannot_lead_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "writes.py").write_text(WRITES)
    for function, said in (("plain", "is not an async function"), ("nobody", "has no nobody")):
        with pytest.raises(ConfigError, match=said):
            load_rollout(
                compose("grpo_code", [f"rollout.fn={tmp_path}/writes.py:{function}"]).rollout
            )
    assert load_rollout(compose("grpo_code").rollout) is None
    wrong = list(problems(compose_unchecked("grpo_code", ["rollout.fn=x"])))
    assert "neither package.module:function" in wrong[0]
    scored = [
        "rollout.fn=a:b",
        "reward.placement=steps",
        "reward.mode=fraction",
    ]
    assert "the last turn is scored" in "".join(problems(compose_unchecked("grpo_code", scored)))


@pytest.mark.parametrize("colour", ["logprob", "version", "advantage"])
def test_people_see_what_the_policy_did_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, colour: Any
) -> None:
    group, _, _ = roll_out(tmp_path, monkeypatch, "twice")
    out = io.StringIO()
    Console(file=out, width=200).print(
        page(group, 0, prompt="ask", step=1, pieces=["t", "", "b", "c", "d", "u"], colour=colour)
    )
    shown = out.getvalue().replace("[3]", "").replace("[4]", "")
    assert "t\u27e8bcd\u27e9u" in shown
    assert "[-1]" not in shown


@pytest.mark.parametrize(("asked", "limit"), [(None, 8), (3, 3), (20, 8)])
def test_the_limit_of_a_turn_is_within_the_room_of_the_sample(
    asked: int | None, limit: int
) -> None:
    limits: list[int] = []

    async def write(request_id: str, token_ids: IntArray, sampling: Sampling) -> Completion:
        limits.append(sampling.max_new_tokens)
        return Completion(
            index=0,
            token_ids=np.array([1], np.int32),
            logprobs=np.zeros(1, np.float32),
            versions=np.zeros(1, np.int32),
            is_truncated=False,
        )

    class Words:
        def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
            return "a"

    prompt = Prompt(
        prompt_id="p", text="", token_ids=np.ones(1, np.int32), data_source="",
        problem=CodeProblem(tests=[]),
    )  # fmt: skip
    sampling = Sampling(temperature=1.0, max_new_tokens=8)
    client: Any = None
    sample = Conversation(
        prompt, sampling, name="1.1.0", max_turns=2, write=write, tokenizer=Words(), client=client
    )
    asyncio.run(sample.write(max_tokens=asked))
    assert limits == [limit]
