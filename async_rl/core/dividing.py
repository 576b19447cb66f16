"""Consecutive items in parts of bounded size: messages, copies, buffers."""

from __future__ import annotations

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
