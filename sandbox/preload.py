"""Modules that a zygote loads before it forks: standard modules that programs use, the names that
contest code expects, and replacements for calls that a jail refuses.

The cost of a fork grows with anonymous memory, so the list is short. A program that imports another
module reads it from disk.
"""

import builtins
import importlib
import io
import os
import resource
import site
import sys
import threading
import types
from collections.abc import Mapping
from typing import Any

from . import cases

# The imports of LiveCodeBench's runner in its order: of equal names the last one counts.
_STAR = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools"
    " operator io json typing"
)
_OTHERS = (
    "abc collections.abc contextlib dataclasses decimal enum fractions numbers os struct sys"
    " threading time types"
)

_STREAMS = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
# Programs request up to 512 MB for deep recursion. Address space is limited, and Python 3.11
# needs no stack for a call of a Python function.
_LARGEST_STACK_BYTES = 64 << 20

CALL_NAMES = types.ModuleType("builtins")
CALL_BUILTINS = vars(CALL_NAMES)
"""The builtins, and names that LeetCode's environment and the runners of contest data provide
(`List`, `deque`, `gcd`, ...). None of these names shadows a builtin.

They are builtins because copies in a program's globals would dirty a hundred pages by their
reference counts alone.
"""


def load(packages: Mapping[str, str]) -> None:
    """Import the modules, collect the names, and import the packages.

    packages: name -> directory, which stays on the path for later imports of the package.
    """
    # The interpreter runs with -S, which leaves out exit() and quit(); contest code calls them.
    site.setquit()
    for name in _OTHERS.split():
        importlib.import_module(name)
    for name in _STAR.split():
        module = importlib.import_module(name)
        public = getattr(module, "__all__", None) or [
            name for name in vars(module) if not name.startswith("_")
        ]
        CALL_BUILTINS.update({name: getattr(module, name) for name in public})
    CALL_BUILTINS.update({name: sys.modules[name] for name in (*_STAR.split(), "sys")})
    _install()
    # Last: `pow` of math must not hide the builtin.
    CALL_BUILTINS.update(vars(builtins))
    # After the standard library, so that a package cannot replace one of its modules.
    sys.path += sorted(set(packages.values()) - set(sys.path))
    for name in packages:
        importlib.import_module(name)
    if "pytest" in packages:
        # It imports half of itself when it runs, and a cell shows no other package to it.
        module = types.ModuleType("test")
        module.__dict__["test_it"] = lambda: None
        cases.run_by_pytest(module)


def _install() -> None:
    """Replace calls that contest programs make and that a jail refuses.

    The replacements protect nothing, because a program can undo them. The limits apply whatever
    `setrlimit` answers.
    """
    open_file = io.open
    set_stack_size = threading.stack_size

    def open_stream(file: Any, *args: Any, **keywords: Any) -> Any:
        """`open`, which knows the standard streams by their names: a cell has no /proc."""
        if type(file) is str and file in _STREAMS:
            file = os.dup(_STREAMS[file])
        return open_file(file, *args, **keywords)

    def stack_size(size: int = 0) -> int:
        """`threading.stack_size` with a largest size."""
        return set_stack_size(min(size, _LARGEST_STACK_BYTES))

    def set_limit(resource_kind: int, limits: tuple[int, int]) -> None:
        """`resource.setrlimit` without an effect: a program may not change its limits."""

    builtins.open = io.open = open_stream
    threading.stack_size = stack_size
    resource.setrlimit = set_limit
