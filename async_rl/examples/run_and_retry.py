"""Rollout of two turns: the model writes a program, the sandbox runs it, and the model reads the
outcome and may write another one.

`rollout.fn` in conf/grpo_code_retry.yaml names it; docs/tutorials/own_environment.md explains it.
"""

from async_rl.core.types import Verdict
from async_rl.rollouts.conversation import Conversation

_SHOWN = slice(1, 2)
"""The test whose outcome the model reads. The first one calls with an empty list."""

_MAX_TURN_TOKENS = 64
"""A program needs at most 43. A longer turn would leave no room for the second one, and most of the
trained tokens would be its text.
"""


def second_prompt(outcome: str, prompt: str) -> str:
    """Return the prompt after a program that failed: its outcome, and the prompt again."""
    return f"# {outcome}\n{prompt}"


async def rollout(talk: Conversation) -> None:
    """Lead one sample: a second program only if the first one fails the shown test."""
    program = await talk.write(max_tokens=_MAX_TURN_TOKENS)
    results = await talk.test(program, talk.tests[_SHOWN])
    if all(result.verdict is Verdict.PASS for result in results):
        return
    outcome = results[0].message.rpartition(" returned ")[2] or results[0].verdict.value
    talk.tell(second_prompt(outcome, talk.prompt.text))
    await talk.write(max_tokens=_MAX_TURN_TOKENS)
