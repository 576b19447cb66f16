"""Operations that begin before the result of an earlier one is needed: copies, gathers, sends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def one_ahead(begun: Iterable[T]) -> Iterator[T]:
    """Yield operations in order, each once the next has begun; keep no other."""
    waiting: deque[T] = deque()
    for operation in begun:
        waiting.append(operation)
        # The deque alone: a second name would keep the tensors of a finished operation.
        if len(waiting) == 2:
            yield waiting.popleft()
    yield from waiting
