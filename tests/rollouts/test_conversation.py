"""Facts about samples in several turns: which tokens carry loss, what the limits cut, what is
judged and what people see.
"""

import asyncio
from pathlib import Path

import pytest
from composing import compose, compose_unchecked
from rollouts_support import Alphabet, Judge, Parrot, opened_rollouts, ticket_of

from async_rl.config.checks.run import problems
from async_rl.config.plugins import load_rollout
from async_rl.core.errors import ConfigError, root_cause
from async_rl.core.types import Group
from async_rl.launchers.commands.stored import response_text
from async_rl.rollouts.conversation import open_conversations

WRITES = """
async def twice(talk):
    assert talk.row == {"wanted": 3}
    first = await talk.write()
    talk.tell("bcd")
    await talk.write(max_tokens=1)
    talk.tell("z")

async def chooses(talk):
    await talk.write()
    return "my answer"

async def endless(talk):
    while True:
        # More than there is room for.
        await talk.write(max_tokens=20)
        talk.tell("b")

async def says_too_much(talk):
    await talk.write()
    talk.tell("b" * 30)

async def silent(talk):
    return "nothing"

async def number(talk):
    await talk.write()
    return 0.5

async def fails(talk):
    await talk.write()
    raise ZeroDivisionError("mine")

def plain(talk):
    return None
"""


def roll_out(tmp_path: Path, function: str, *overrides: str) -> tuple[Group, Judge, Parrot]:
    """A group of two samples of at most 8 tokens."""
    (tmp_path / "writes.py").write_text(WRITES)
    lead = f"rollout.fn={tmp_path}/writes.py:{function}"
    config = compose("grpo_code", ["generation.group_size=2", lead, *overrides])
    judge, parrot = Judge(), Parrot()

    async def run() -> Group:
        maker = open_conversations(config, Alphabet())
        ticket = ticket_of(2, row='{"wanted": 3}', max_new_tokens=8)
        async with opened_rollouts(config, judge, maker=maker) as rollouts:
            return await rollouts.group(ticket, parrot, written=lambda: None)

    return asyncio.run(run()), judge, parrot


def test_only_what_the_policy_wrote_is_trained_as_it_was_written(tmp_path: Path) -> None:
    group, judge, parrot = roll_out(tmp_path, "twice", "algorithm=remax")
    assert len(group.trajectories) == 2
    for sample in group.trajectories:
        # The end token of the first turn stays; text after the last turn is gone.
        assert sample.token_ids.tolist() == [1, 2, 21, 0, 2, 3, 4, 22]
        assert sample.loss_mask.tolist() == [False, False, True, True, False, False, False, True]
        assert sample.behavior_logprobs.tolist() == [0, 0, -0.5, -0.5, 0, 0, 0, -1.5]
        assert sample.versions.tolist() == [-1, -1, 3, 3, -1, -1, -1, 4]
        # The function cut the second turn, not the limit of the sample.
        assert not sample.is_truncated
    assert [(s.response, s.transcript) for s in judge.samples] == [("v", "ubcdv")] * 3
    assert judge.samples[0].is_written == [True, True, False, False, False, True]
    assert parrot.before["1.1.0.1"] == [1, 2, 21, 0, 2, 3, 4]
    # The greedy answer of remax is made in the same way.
    assert group.baseline is not None
    assert group.baseline.token_ids.tolist() == group.trajectories[0].token_ids.tolist()
    # People see what the policy did not write.
    shown = response_text(group.trajectories[0], lambda ids: f"{len(ids)} ")
    assert shown == "2 \u27e83 \u27e91 "
    assert roll_out(tmp_path, "chooses")[1].texts == ["my answer"] * 2


@pytest.mark.parametrize(
    ("function", "overrides", "length"),
    [
        ("endless", ["rollout.max_turns=1"], 2),
        ("endless", ["rollout.max_turns=2"], 5),
        # At most data.max_response_tokens.
        ("endless", [], 8),
        ("says_too_much", [], 2),
    ],
)
def test_a_sample_ends_cut_off_at_its_limits(
    tmp_path: Path, function: str, overrides: list[str], length: int
) -> None:
    group, _, parrot = roll_out(tmp_path, function, *overrides)
    # Of the 8 tokens of a sample.
    assert set(parrot.limits) <= {8, 8 - 3, 8 - 6}
    found = [(sample.response_length, sample.is_truncated) for sample in group.trajectories]
    assert found == [(length, True)] * 2


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("silent", "before the policy wrote anything"),
        ("number", "rollout.fn returned 0.5; return a text to score, or None"),
        ("fails", "mine"),
    ],
)
def test_a_function_that_fails_fails_the_group(tmp_path: Path, function: str, message: str) -> None:
    with pytest.raises(ExceptionGroup) as failed:
        roll_out(tmp_path, function)
    assert message in str(root_cause(failed.value))


def test_a_function_that_cannot_lead_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "writes.py").write_text(WRITES)
    for function, message in (("plain", "is not an async function"), ("nobody", "has no function")):
        config = compose("grpo_code", [f"rollout.fn={tmp_path}/writes.py:{function}"])
        with pytest.raises(ConfigError, match=message):
            load_rollout(config.rollout)
    assert load_rollout(compose("grpo_code").rollout) is None
    steps = ["rollout.fn=a:b", "reward.placement=steps", "reward.mode=fraction"]
    assert "the last turn is scored" in "".join(problems(compose_unchecked("grpo_code", steps)))
