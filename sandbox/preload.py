"""What a zygote has in memory before it forks: the standard modules that programs use, and the names contest code expects.

Fork cost follows anonymous memory, so the list is short; a module that is missing here is read from disk by the program that imports it.
Used by `zygote.py` (load, warm_up) and `child.py` (CALL_NAMES).
"""

from __future__ import annotations

import builtins
import importlib
import site
from typing import Any

_MODULES = (
    "abc", "array", "bisect", "cmath", "collections", "collections.abc", "contextlib", "copy", "dataclasses", "datetime", "decimal",
    "enum", "fractions", "functools", "heapq", "io", "itertools", "json", "math", "numbers", "operator", "os", "random", "re",
    "statistics", "string", "struct", "sys", "textwrap", "threading", "time", "types", "typing",
)  # fmt: skip
_STAR = ("typing", "collections", "itertools", "functools", "heapq", "bisect", "math", "string", "operator", "random")
_NAMED = ("collections", "itertools", "functools", "heapq", "bisect", "math", "string", "operator", "random", "re", "sys", "typing")

CALL_NAMES: dict[str, Any] = {}
"""Names that code in LeetCode's style takes for granted (`List`, `deque`, `gcd`, ...); never one that shadows a builtin."""


def load() -> None:
    """Import the modules and collect the names. `-S` leaves out exit() and quit(), which contest code calls."""
    site.setquit()
    site.setcopyright()
    site.sethelper()
    modules = {name: importlib.import_module(name) for name in _MODULES}
    for module in (modules[name] for name in _STAR):
        public = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
        CALL_NAMES.update({name: getattr(module, name) for name in public if name not in vars(builtins)})
    CALL_NAMES.update({name: modules[name] for name in _NAMED})


def warm_up() -> None:
    """Run a little of everything once, so that caches are filled and pages touched before the first fork."""
    namespace: dict[str, Any] = {"__name__": "warm"}
    source = "from typing import List\nimport math, re\n@__import__('dataclasses').dataclass\nclass A:\n    x: int\n"
    source += "def f(x: List[int]) -> list:\n    return sorted(set(y * 2 for y in x if y > 1), key=lambda v: -v)\n"
    source += "r = [f(list(range(9))), str(A(1)), re.sub('a', 'b', 'abc'), math.gcd(4, 6), f'{1.5:.2f}', {'a': [1, (2,)]}]\n"
    exec(compile(source, "warm", "exec", dont_inherit=True), namespace)
