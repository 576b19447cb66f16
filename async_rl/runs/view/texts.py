"""Numbers and times as people read them."""

import math

from async_rl.monitoring import status

_LARGE = 1e4
_SMALL = 1e-3


def number(value: float | None) -> str:
    """Return a number as people read it: three or four digits, no exponent where none is needed."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if size >= _LARGE:
        for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
            if size >= scale:
                return f"{value / scale:.3g} {unit}"
    if 0 < size < _SMALL:
        return f"{value:.1e}"
    return f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """Return a time in the two largest units that it has; stages of a step are short, so times
    below ten seconds have a decimal.
    """
    if seconds is None:
        return "–"
    return f"{seconds:.1f} s" if seconds < 10 else status.duration(seconds)
