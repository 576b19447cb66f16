"""Files and functions stay small enough to hold one idea."""

import ast

from repository import ROOT, name, product, syntax

MAX_FILE_LINES = 330
MAX_FUNCTION_LINES = 70
MAX_README_LINES = 120


def test_no_file_holds_two_ideas() -> None:
    lengths = {name(path): len(path.read_text().splitlines()) for path in product()}
    assert {n: lines for n, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_no_function_holds_two_ideas() -> None:
    long = [
        f"{name(path)}:{node.lineno} {node.name} has {length} lines"
        for path in product()
        for node in ast.walk(syntax(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_the_readme_fits_on_two_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES
