"""The fingerprint of the messages, by which processes of different versions recognise each other.

Computed from the fields of every message, so no version number has to be raised by hand.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import pkgutil

from async_rl import protocol
from async_rl.core import output_rules, types
from async_rl.core.value import Value

_DIGITS = 12
_VALUES = (types.__name__, output_rules.__name__)


@functools.cache
def message_schema() -> str:
    """Return a hash of the names, fields and types of all messages and of the values in them."""
    for module in pkgutil.iter_modules(protocol.__path__, f"{protocol.__name__}."):
        importlib.import_module(module.name)
    text = "\n".join(sorted(_described(Value)))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def _described(kind: type[Value]) -> list[str]:
    """Return a line per class below this one that crosses a socket."""
    lines = []
    for child in kind.__subclasses__():
        # Other modules have values too, and not every process imports them.
        if child.__module__ in _VALUES or child.__module__.startswith(protocol.__name__):
            lines.append(f"{child.__name__} {child.__annotations__}")
        lines += _described(child)
    return lines
