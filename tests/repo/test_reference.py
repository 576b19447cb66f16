"""The pages of docs/ that are made from code or notebooks are what these make."""

from pathlib import Path

import nbformat
import pytest
from repository import ROOT, name

from async_rl.composition.schema import settings
from docs.generate.notebooks import notebooks, page
from docs.generate.pages import pages
from docs.generate.settings import settings_page, short_span


def test_the_pages_are_what_the_code_says() -> None:
    texts = pages().items()
    old = [name for name, text in texts if (ROOT / "docs" / name).read_text() != text]
    assert old == [], "run make docs and commit what it writes"


def test_every_setting_stands_on_the_page_once_with_its_range_and_meaning() -> None:
    rows = [line for line in settings_page().splitlines() if line.startswith("| `")]
    for path, setting in settings().items():
        (row,) = [row for row in rows if row.startswith(f"| `{path}` |")]
        _, _, values, meaning, _ = (cell.strip() for cell in row.replace("\\|", "/").split("|"))
        assert values.endswith(short_span(setting).replace("|", "/"))
        assert meaning == setting.description.replace("|", "/")


def test_the_page_opens_with_fifteen_settings_that_exist() -> None:
    opening = settings_page().partition("\n## The run")[0]
    rows = [line for line in opening.splitlines() if line[2:3].isdigit()]
    assert len(rows) == 15
    assert [row for row in rows if row.split("`")[1] not in settings()] == []


@pytest.mark.parametrize("path", notebooks(), ids=name)
def test_the_page_of_a_notebook_has_its_outputs_of_cells_in_order(path: Path) -> None:
    for file, text in page(path).items():
        assert (path.parent / file).read_text() == text, "run make notebooks and commit its files"
    cells = nbformat.read(path, as_version=4).cells
    counts = [cell.execution_count for cell in cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
