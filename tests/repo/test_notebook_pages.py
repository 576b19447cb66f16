"""The pages of the notebooks are what the notebooks contain."""

from pathlib import Path

import nbformat
import pytest
from notebooks import notebooks, page
from repository import name


@pytest.mark.parametrize("path", notebooks(), ids=name)
def test_the_page_is_the_notebook_with_its_outputs(path: Path) -> None:
    for file, text in page(path).items():
        assert (path.parent / file).read_text() == text, "run make notebooks and commit its files"


@pytest.mark.parametrize("path", notebooks(), ids=name)
def test_every_cell_was_executed_in_order(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    counts = [cell.execution_count for cell in cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
