"""Token ids cut to a length, on the side that is named, or repeated up to it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Truncation = Literal["error", "drop", "left", "right", "middle"]


def fitted(ids: Sequence[int], limit: int, mode: Truncation) -> list[int] | None:
    """At most `limit` of the ids: the last ones ("left" is cut off), the first ones, or some of
    both; None where none may be cut.

    ids: int [L] -> int [min(L, limit)].  With an odd limit "middle" keeps one more at the end,
    where the question and the generation prompt are.
    """
    if len(ids) <= limit:
        return list(ids)
    if mode == "left":
        return list(ids[-limit:])
    if mode == "right":
        return list(ids[:limit])
    if mode == "middle":
        # The end has the question and the generation prompt, so it gets the odd token.
        first = limit // 2
        return [*ids[:first], *ids[len(ids) - (limit - first) :]]
    return None


def filled(ids: Sequence[int], length: int) -> list[int]:
    """The ids repeated to exactly `length`, ending as they end. ids: int [L], 1 <= L <= length ->
    int [length].
    """
    repeated = list(ids) * -(-length // len(ids))
    return repeated[len(repeated) - length :]
