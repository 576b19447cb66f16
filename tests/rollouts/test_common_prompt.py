"""What all agents of a group read first is stored, sent and computed once."""

import msgspec
import numpy as np
import pytest
from learner_support import make_groups

from async_rl.buffer.tickets import check_group
from async_rl.core.errors import ProtocolError
from async_rl.core.heads import pack_group, read_group
from async_rl.core.types import Branch, Score, StepScore, Trajectory
from async_rl.launchers.commands.stored import response_text
from async_rl.rollouts.conversation import with_common_prompt

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
    found = with_common_prompt(samples)
    packed = pack_group(msgspec.structs.replace(make_groups(1)[0], trajectories=found))
    group = read_group(packed)
    check_group(group, np.array(PROMPT, np.int32), newest_version=0, vocabulary_size=50)
    for before, after in zip(samples, group.unpacked().trajectories, strict=True):
        assert after.token_ids[: after.prompt_length].tolist() == prompt
        (step,), (step_before,) = after.score.steps, before.score.steps
        assert step.end_tokens + after.prompt_length == step_before.end_tokens + 2
        if before.branches:
            # A person sees all that the agent read.
            assert response_text(after, str) == response_text(before, str)
        fields = ("token_ids", "loss_mask", "behavior_logprobs", "versions")
        assert all(np.array_equal(getattr(before, f), getattr(after, f)) for f in fields)
        assert after.branches == before.branches


@pytest.mark.parametrize(
    ("branches", "reason"),
    [([((2, -1),), ((3, -1),)], "different branches"), ([((1, -1),)] * 2, "branches start")],
)
def test_a_prompt_that_is_no_common_one_is_refused(
    branches: list[tuple[Branch, ...]], reason: str
) -> None:
    shared = with_common_prompt([sample([5, 6, 7]), sample([5, 6, 8])])
    changed = [
        msgspec.structs.replace(one, branches=own)
        for one, own in zip(shared, branches, strict=True)
    ]
    group = msgspec.structs.replace(make_groups(1)[0], trajectories=changed)
    with pytest.raises(ProtocolError, match=reason):
        check_group(
            read_group(pack_group(group)),
            np.array(PROMPT, np.int32),
            newest_version=0,
            vocabulary_size=50,
        )
