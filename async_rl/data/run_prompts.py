"""The prompts of a run: training prompts in the order of issue, and the held-out
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from async_rl.config.run import RunConfig
from async_rl.core.errors import DataError
from async_rl.core.frozen import frozen
from async_rl.core.types import Prompt, Purpose
from async_rl.data.order import PromptOrder
from async_rl.data.prompts import PromptList, load_eval_prompts, load_train_prompts


@frozen
class RunPrompts:
    """Training prompts with their order, and the prompts of one evaluation.

    vocabulary_size: of the model; no token id reaches it.
    """

    train: PromptList
    order: PromptOrder
    held_out: Sequence[Prompt]
    vocabulary_size: int

    @property
    def num_held_out(self) -> int:
        """Prompts of one evaluation."""
        return len(self.held_out)

    def prompt(self, purpose: Purpose, index: int) -> Prompt:
        """The index-th prompt of the purpose's order."""
        if purpose is Purpose.TRAIN:
            return self.train[self.order.index(index)]
        return self.held_out[index]


def load_prompts(
    config: RunConfig,
    tokenizer: Any,
    refused: Callable[[DataError], None],
    *,
    vocabulary_size: int,
) -> RunPrompts:
    """The prompts of the run. refused: as in `load_train_prompts`. Raises DataError."""
    train = load_train_prompts(config, tokenizer, refused)
    if not train:
        raise DataError(
            f"data.train_files={config.data.train_files} contains no usable prompt; the log names"
            " the rows that were left out"
        )
    held_out = load_eval_prompts(config, tokenizer)
    # The first ones in every evaluation, so that its numbers can be compared over the run.
    limit = config.evaluation.num_prompts or len(held_out)
    return RunPrompts(
        train=train,
        order=PromptOrder(config.seed, len(train), shuffle=config.data.shuffle),
        held_out=held_out[:limit],
        vocabulary_size=vocabulary_size,
    )
