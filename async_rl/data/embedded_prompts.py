"""The prompts of the embedded task, each made when it is requested.

To make all takes two to three seconds of every start of a buffer, and a short run needs a few.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from async_rl.config.run import RunConfig
from async_rl.core.types import Prompt
from async_rl.data import list_functions
from async_rl.data.drafts import Draft, Drafter
from async_rl.data.embedded import LIST_FUNCTIONS
from async_rl.data.files import Rejected

LONGEST_TOKENS = 32
"""No prompt of the embedded task has more tokens of the embedded model."""


class EmbeddedPrompts(Sequence[Prompt]):
    """Each spec once with one of its wordings, in turn, then each with the other.

    Invariant: no prompt is longer than data.max_prompt_tokens, which the caller ensures.
    """

    def __init__(
        self, specs: Sequence[list_functions.Spec], config: RunConfig, tokenizer: Any
    ) -> None:
        self.drafter = Drafter([], config, tokenizer)
        self._specs = specs
        self._has_chats = bool(tokenizer.chat_template)
        self._tests = list_functions.HiddenTests(LIST_FUNCTIONS)

    def __len__(self) -> int:
        return list_functions.NUM_WORDINGS * len(self._specs)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        numbers = range(len(self))[index]
        if isinstance(numbers, int):
            return self._made([numbers])[0]
        return self._made(numbers)

    def draft(self, index: int) -> Draft:
        """The prompt before tokenization."""
        turn, number = divmod(index, len(self._specs))
        spec = self._specs[number]
        wording = (number + turn) % list_functions.NUM_WORDINGS
        name = f"{list_functions.DATA_SOURCE}/{spec.name}/{wording}"
        text = list_functions.wording(spec, wording)
        if self._has_chats:
            text = self.drafter.render(name, [{"role": "user", "content": text}])
        return Draft(
            origin=name,
            prompt_id=name,
            text=text,
            data_source=list_functions.DATA_SOURCE,
            problem=self._tests(spec),
        )

    def _made(self, indices: Sequence[int]) -> list[Prompt]:
        """Tokenized together, which is faster than one by one."""
        made = []
        for _, prompt in self.drafter.encode([self.draft(index) for index in indices]):
            assert not isinstance(prompt, Rejected), prompt.reason
            made.append(prompt)
        return made
