"""The prompts of training files that do not fit in memory: each row is read, checked and
tokenized when it is requested.

Invariants: prompt i is made from row i, in any process and after any restart. If row i cannot be
used, prompt i is made from the next usable row, and the row is passed to `refused`, or counted and
logged if the configuration leaves such rows out.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import logging
from collections.abc import Callable, Sequence

from async_rl.core.errors import DataError
from async_rl.core.types import Prompt
from async_rl.data.files import Placed, Rejected
from async_rl.data.tables import Table

_NUM_KEPT = 4096
"""Prompts kept: a group's prompt is requested several times within a few steps."""
_log = logging.getLogger(__name__)


class StreamedPrompts:
    """See above. read: what becomes of (number of the table, number of the row counted from 1,
    row). is_refused: not to be left out.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        read: Callable[[int, int, Placed], Prompt | Rejected],
        *,
        is_refused: Callable[[Rejected], bool],
        refused: Callable[[DataError], None],
    ) -> None:
        self._tables = tables
        self._ends = list(itertools.accumulate(map(len, tables)))
        self._read = read
        self._is_refused = is_refused
        self._refused = refused
        self._num_dropped = 0
        self._usable = functools.lru_cache(maxsize=_NUM_KEPT)(self._usable_from)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Prompt:
        # Iteration over a sequence stops at IndexError; a negative index would silently mean
        # another row.
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._usable(index)

    def read(self, index: int) -> Prompt | Rejected:
        """The prompt of this row, or why it is rejected."""
        table = bisect.bisect_right(self._ends, index)
        number = index - (self._ends[table - 1] if table else 0)
        return self._read(table, number + 1, self._tables[table][number])

    def _usable_from(self, index: int) -> Prompt:
        # At most once around: a file without a usable row has nothing to return.
        for step in range(len(self)):
            row_prompt = self.read((index + step) % len(self))
            if isinstance(row_prompt, Prompt):
                return row_prompt
            if self._is_refused(row_prompt):
                self._refused(DataError(row_prompt.reason))
            else:
                self._num_dropped += 1
                if self._num_dropped.bit_count() == 1:  # the 1st, 2nd, 4th, 8th, ...
                    _log.warning(
                        "%d rows so far cannot be used and were replaced by the next ones; the"
                        " last: %s",
                        self._num_dropped,
                        row_prompt.reason,
                    )
        raise DataError(f"none of {len(self)} rows can be used; see the log for why")
