"""Prompts that are made when they are requested, for data that does not fit in memory and for the
embedded task. To make all of its prompts takes two to three seconds, and a short run needs few.

Invariants: prompt i is made from row i, in any process and after any restart. If row i cannot be
used, prompt i is made from the next usable row, and the row is passed to `refused`, or counted and
logged if the configuration leaves such rows out.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import overload

from async_rl.core.errors import DataError
from async_rl.core.types import Prompt
from async_rl.data.drafts import Rejected

_NUM_KEPT = 4096
"""Prompts kept: a group's prompt is requested several times within a few steps."""
_log = logging.getLogger(__name__)


class StreamedPrompts(Sequence[Prompt]):
    """See above. read: returns the prompt of a row, or why it has none. refused: receives a row
    that has none, and returns whether the configuration refuses it.
    """

    def __init__(
        self,
        num_rows: int,
        read: Callable[[int], Prompt | Rejected],
        refused: Callable[[Rejected], bool],
    ) -> None:
        self._num_rows = num_rows
        self._read = read
        self._refused = refused
        self._num_dropped = 0
        self._usable = functools.lru_cache(maxsize=_NUM_KEPT)(self._usable_from)

    def __len__(self) -> int:
        return self._num_rows

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        numbers = range(len(self))[index]
        if isinstance(numbers, int):
            return self._usable(numbers)
        return [self._usable(number) for number in numbers]

    def _usable_from(self, index: int) -> Prompt:
        # At most once around: a file without a usable row has nothing to return.
        for step in range(len(self)):
            row_prompt = self._read((index + step) % len(self))
            if isinstance(row_prompt, Prompt):
                return row_prompt
            if not self._refused(row_prompt):
                self._num_dropped += 1
                # Each in a log of millions of rows would hide everything else.
                if self._num_dropped.bit_count() == 1:  # the 1st, 2nd, 4th, 8th, ...
                    _log.warning(
                        "%d rows so far cannot be used and were replaced by the next ones; the"
                        " last: %s",
                        self._num_dropped,
                        row_prompt.reason,
                    )
        raise DataError(f"none of {len(self)} rows can be used; see the log for why")
