"""OpenRLHF's reward function: `--reward.remote_url <path of this file>`.

The label of a prompt (`--data.label_key`) is its row, as JSON. A response that cannot be judged
raises, so its reward is absent and OpenRLHF drops the sample.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from async_rl.adapters.grader import scores_of


def reward_func(
    queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **_: Any
) -> dict[str, Any]:
    """Reward and score of each query, the share of its passed tests.

    A query is a prompt and its response.
    """
    # OpenRLHF passes the response only together with its prompt.
    responses = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    rows = [msgspec.json.decode(label) for label in labels]
    scores = asyncio.run(scores_of(responses, rows))
    return {"rewards": scores, "scores": scores, "extra_logs": {}}
