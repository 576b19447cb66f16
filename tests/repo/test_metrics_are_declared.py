"""Product code and the catalogue of metrics agree: nothing is written that is not declared, nothing
is declared that nobody writes.
"""

import ast
import re

from repository import name, product, syntax

from async_rl.observability.catalogue import FIRST_SCREEN, METRICS, describe

GROUPS = {metric.split("/")[0] for metric in METRICS}
CATALOGUE = "async_rl/observability/catalogue.py"


def literals() -> dict[str, str]:
    """String literals of product code that look like a metric, and where they stand."""
    found: dict[str, str] = {}
    for path in product():
        if name(path) == CATALOGUE:
            continue
        for node in ast.walk(syntax(path)):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and re.fullmatch(r"[a-z_]+/[a-z0-9_]+", node.value)
            ):
                found[node.value] = f"{name(path)}:{node.lineno}"
    return found


def test_every_metric_that_code_names_is_declared() -> None:
    undeclared = {
        n: where
        for n, where in literals().items()
        if n.split("/")[0] in GROUPS and describe(n) is None
    }
    assert undeclared == {}


def test_every_declared_scalar_is_written_by_someone() -> None:
    code = "\n".join(path.read_text() for path in product() if name(path) != CATALOGUE)
    # A name may be put together (f"queue/{state}", prefix + "/loss"): its last part then stands
    # alone in quotes.
    unwritten = [
        n
        for n in METRICS
        if "<" not in n and f'"{n}"' not in code and f'"{n.rpartition("/")[2]}"' not in code
    ]
    assert unwritten == []


def test_the_first_screen_shows_what_is_written() -> None:
    assert all(describe(n) for chart in FIRST_SCREEN.values() for n in chart.metrics)
