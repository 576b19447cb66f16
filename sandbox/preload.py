"""Modules that a zygote loads before it forks: standard modules that programs use, and the names
that contest code expects.

The cost of a fork grows with anonymous memory, so the list is short. A program that imports another
module reads it from disk.
"""

from __future__ import annotations

import builtins
import importlib
import site
import sys
from collections.abc import Mapping
from typing import Any

from . import habits

_MODULES = (
    "abc", "bisect", "collections", "collections.abc", "contextlib", "copy", "dataclasses",
    "datetime", "decimal", "enum", "fractions", "functools", "heapq", "io", "itertools", "json",
    "math", "numbers", "operator", "os", "random", "re", "statistics", "string", "struct", "sys",
    "threading", "time", "types", "typing",
)  # fmt: skip
_STAR = (
    "typing",
    "collections",
    "itertools",
    "functools",
    "heapq",
    "bisect",
    "math",
    "string",
    "operator",
    "random",
)
_NAMED = (*_STAR, "re", "sys")

CALL_BUILTINS: dict[str, Any] = {}
"""The builtins, and names that LeetCode's environment provides (`List`, `deque`, `gcd`, ...), none
of which shadows a builtin.

They are builtins because copies in a program's globals would dirty a hundred pages by their
reference counts alone.
"""


def load() -> None:
    """Import the modules and collect the names.

    The interpreter runs with `-S`, which leaves out exit() and quit(); contest code calls them.
    """
    site.setquit()
    site.setcopyright()
    site.sethelper()
    modules = {name: importlib.import_module(name) for name in _MODULES}
    for module in map(modules.__getitem__, _STAR):
        public = getattr(module, "__all__", None) or [
            name for name in vars(module) if not name.startswith("_")
        ]
        CALL_BUILTINS.update({name: getattr(module, name) for name in public})
    CALL_BUILTINS.update({name: modules[name] for name in _NAMED})
    habits.install()
    CALL_BUILTINS.update(vars(builtins))


def load_packages(packages: Mapping[str, str]) -> None:
    """Import each package from its directory, which stays on the path for what it imports later."""
    sys.path += sorted(set(packages.values()) - set(sys.path))
    for name in packages:
        importlib.import_module(name)
