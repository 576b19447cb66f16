"""TRL's reward function: `GRPOTrainer(reward_funcs=[passed_tests], ...)`.

The columns of the data set are the row. If the verifier is away for longer than the grader's limit,
the whole batch has the reward None, which TRL leaves out.
"""

import logging
from typing import Any

from async_rl.adapters.grader import scores_of
from async_rl.core.errors import InfrastructureError, root_cause


async def passed_tests(completions: list[Any], **columns: Any) -> list[float | None]:
    """The share of passed tests of each completion, a text or the messages of a chat."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    # TRL also passes values that are not columns, such as the trainer's state.
    rows = [
        {
            name: values[index]
            for name, values in columns.items()
            if isinstance(values, list) and len(values) == len(texts)
        }
        for index in range(len(texts))
    ]
    scores: list[float | None] = [None] * len(texts)
    try:
        scores = [*await scores_of(texts, rows)]
    except* InfrastructureError as errors:
        logging.getLogger(__name__).error("a batch has no rewards: %s", root_cause(errors))
    return scores
