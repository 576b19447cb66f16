"""Numbers as text for people: unbroken runs of them by their ends. Pure."""

import itertools
from collections.abc import Iterable


def ranges(numbers: Iterable[int], *, to: str = " to ", between: str = ", ") -> str:
    """Return different numbers in ascending order, such as "3, 5 to 9"."""
    # In an unbroken run, a number grows as its place does.
    groups = itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    runs = [[str(number) for _, number in group] for _, group in groups]
    return between.join(run[0] if len(run) == 1 else f"{run[0]}{to}{run[-1]}" for run in runs)
