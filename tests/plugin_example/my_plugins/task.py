"""A task of small programs: its rows, its rollout and its reward."""

from collections.abc import Iterator
from typing import Any

from async_rl.rewards.verifier.protocol import RewardSample
from async_rl.rollouts.conversation import Conversation


def rows() -> Iterator[dict[str, Any]]:
    """Programs that add a constant."""
    for number in range(8):
        test = {"kind": "call", "function": "f", "args": [[1]], "expected": [1 + number]}
        yield {"id": f"add-{number}", "prompt": f"Add {number} to every number.", "tests": [test]}


async def one_turn(talk: Conversation) -> None:
    """Lead a sample of one turn."""
    await talk.write()


def short_answers(sample: RewardSample) -> dict[str, float]:
    """Score by the length of the response."""
    return {"short": 1.0 / (1 + len(sample.response))}
