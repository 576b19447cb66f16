"""Text for people: unbroken runs of numbers by their ends, and visible control characters. Pure."""

import itertools
from collections.abc import Iterable

_PICTURES = 0x2400  # Unicode has a picture for each control character: U+241B for escape
# Tables and programs need these two, and no terminal acts on them.
_KEPT = "\t\n"
_VISIBLE = {code: _PICTURES + code for code in range(32) if chr(code) not in _KEPT}
_VISIBLE |= {127: _PICTURES + 33, **dict.fromkeys(range(128, 160), 0xFFFD)}


def visible(text: str) -> str:
    """Return the text with a picture in place of each control character but tab and line feed.

    An escape sequence in the text of a model or a data set could set the clipboard or the title of
    the terminal that shows it.
    """
    return text.translate(_VISIBLE)


def ranges(numbers: Iterable[int], *, to: str = " to ", between: str = ", ") -> str:
    """Return different numbers in ascending order, such as "3, 5 to 9"."""
    # In an unbroken run, a number grows as its place does.
    groups = itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    runs = [[str(number) for _, number in group] for _, group in groups]
    return between.join(run[0] if len(run) == 1 else f"{run[0]}{to}{run[-1]}" for run in runs)
