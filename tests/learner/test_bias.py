"""The table of biases in docs/algorithms.md is what the benchmark computes."""

import pytest

from benchmarks.learning import bias


def test_the_page_has_every_row_and_the_computed_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every fourth row, as all take a minute."""
    page = bias.PAGE.read_text()
    assert all(f"| {row.name} |" in page for row in bias.ROWS)
    monkeypatch.setattr(bias, "ROWS", bias.ROWS[2::4])
    computed = bias.page(bias.table()).splitlines()
    assert {*computed} <= {*page.splitlines()}, (
        "run `python -m benchmarks.learning.bias --page` and commit the page"
    )
