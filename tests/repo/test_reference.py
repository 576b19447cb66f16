"""The pages of docs/ that are made from code are what the code makes."""

from __future__ import annotations

import pytest
from repository import ROOT

from async_rl.launchers.reference import metrics_page, pages
from async_rl.observability.catalogue import METRICS


@pytest.mark.parametrize("name", pages())
def test_the_page_is_what_the_code_says(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == pages()[name], "run make docs and commit what it writes"


def test_every_metric_stands_on_the_page_once_with_its_meaning() -> None:
    rows = [line for line in metrics_page().partition("\n## advantage")[2].splitlines() if line.startswith("| `")]
    assert len(rows) == len(METRICS)
    for spec in METRICS.values():
        assert sum(line.startswith(f"| `{spec.name}` |") and spec.meaning in line.replace("\\|", "|") for line in rows) == 1, spec.name
