"""The markers `proves` and `covers` of all tests, read from their source without importing them.

`@pytest.mark.proves("algorithm.entropy_coef")` says that the test fails if the product ignores the
setting; `make mutants` checks the claim. `@pytest.mark.covers("clip_ratio, eps_clip")` says that
the test shows a knob of a source system, by its name in `source_knobs.yaml`.
"""

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from repository import ROOT, files, syntax


@functools.cache
def marked(kind: str) -> Mapping[str, tuple[str, ...]]:
    """Return, for each name in markers of this kind, the pytest node ids of its tests."""
    tests: dict[str, tuple[str, ...]] = {}
    for path in files(".py"):
        if not path.name.startswith("test_"):
            continue
        for name, node_id in _marks(path, kind):
            tests[name] = (*tests.get(name, ()), node_id)
    return MappingProxyType(tests)


def proofs_of(setting: str) -> tuple[str, ...]:
    """Return the node ids of the tests that prove a setting."""
    return marked("proves").get(setting, ())


def _marks(path: Path, kind: str) -> Iterator[tuple[str, str]]:
    for node in syntax(path).body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for decorator in node.decorator_list:
            if not isinstance(decorator, ast.Call):
                continue
            if ast.unparse(decorator.func) != f"pytest.mark.{kind}":
                continue
            for argument in decorator.args:
                yield ast.literal_eval(argument), f"{path.relative_to(ROOT)}::{node.name}"
