"""What a zygote has in memory before it forks: the standard modules that programs use, and the
names contest code expects.

Fork cost follows anonymous memory, so the list is short; a module that is missing here is read from
disk by the program that imports it. Used by `zygote.py` (load, load_packages) and `programs.py`
(CALL_BUILTINS).
"""

from __future__ import annotations

import builtins
import importlib
import site
import sys
from collections.abc import Mapping
from typing import Any

_MODULES = (
    "abc", "bisect", "collections", "collections.abc", "contextlib", "copy", "dataclasses", "datetime", "decimal",
    "enum", "fractions", "functools", "heapq", "io", "itertools", "json", "math", "numbers", "operator", "os", "random", "re",
    "statistics", "string", "struct", "sys", "threading", "time", "types", "typing",
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
_NAMED = (
    "collections",
    "itertools",
    "functools",
    "heapq",
    "bisect",
    "math",
    "string",
    "operator",
    "random",
    "re",
    "sys",
    "typing",
)

CALL_BUILTINS: dict[str, Any] = {}
"""The builtins, and the names that code in LeetCode's style takes for granted (`List`, `deque`,
`gcd`, ...), none of which shadows one.

As builtins of a program they cost it nothing; copied into its globals, their reference counts alone
would dirty a hundred pages.
"""


def load() -> None:
    """Import the modules and collect the names. `-S` leaves out exit() and quit(), which contest
    code calls.
    """
    site.setquit()
    site.setcopyright()
    site.sethelper()
    modules = {name: importlib.import_module(name) for name in _MODULES}
    for module in (modules[name] for name in _STAR):
        public = getattr(module, "__all__", None) or [
            name for name in vars(module) if not name.startswith("_")
        ]
        CALL_BUILTINS.update({name: getattr(module, name) for name in public})
    CALL_BUILTINS.update({name: modules[name] for name in _NAMED})
    CALL_BUILTINS.update(vars(builtins))


def load_packages(packages: Mapping[str, str]) -> None:
    """Import each package from its directory, which stays on the path for what it imports later."""
    sys.path += sorted(set(packages.values()) - set(sys.path))
    for name in packages:
        importlib.import_module(name)
