"""Rollout of two turns: the model writes a program, it is run in the sandbox, the model reads what
came of it and may write another one.

Named by `rollout.fn` in conf/grpo_code_retry.yaml; explained in docs/multi_turn.md.
"""

from __future__ import annotations

from async_rl.core.types import Verdict
from async_rl.data.list_functions import second_prompt
from async_rl.rollouts.conversation import Conversation

_SHOWN = slice(1, 2)
"""The test whose outcome the model gets to read; the first one calls with an empty list and tells
little.
"""

_MAX_TURN_TOKENS = 64
"""A program needs 43 at most; a turn without end would take the room of the second, and drown what
is learnt in its tokens.
"""


async def rollout(talk: Conversation) -> None:
    """Leads one sample: at most one second try, and only where the first program fails the test
    that is shown.
    """
    program = await talk.write(max_tokens=_MAX_TURN_TOKENS)
    results = await talk.test(program, talk.tests[_SHOWN])
    if all(result.verdict is Verdict.PASS for result in results):
        return
    outcome = results[0].message.rpartition(" gave ")[2] or results[0].verdict.value
    talk.tell(second_prompt(outcome, talk.prompt.text))
    await talk.write(max_tokens=_MAX_TURN_TOKENS)
