"""Items in parts of bounded size, and operations that begin before the result of an earlier one
is needed: messages, copies, gathers, sends.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def divided(sized: Iterable[tuple[T, int]], most: int) -> Iterator[list[T]]:
    """Yield the items in order, together those with a sum of at most `most`, or one larger item.

    sized: each item with its size.
    """
    part: list[T] = []
    total = 0
    for item, size in sized:
        if part and total + size > most:
            yield part
            part = []
            total = 0
        part.append(item)
        total += size
    if part:
        yield part


def one_ahead(begun: Iterable[T]) -> Iterator[T]:
    """Yield operations in order, each once the next has begun; keep no other."""
    waiting: deque[T] = deque()
    for operation in begun:
        waiting.append(operation)
        # The deque alone: a second name would keep the tensors of a finished operation.
        if len(waiting) == 2:
            yield waiting.popleft()
    yield from waiting
