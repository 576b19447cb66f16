"""Files and functions stay small enough to hold one idea, and each says what it is for."""

from __future__ import annotations

import ast

from repository import ROOT, name, product

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
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_every_file_opens_with_its_responsibility() -> None:
    assert [
        name(path) for path in product() if not ast.get_docstring(ast.parse(path.read_text()))
    ] == []


def test_the_readme_fits_on_two_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


def test_no_two_test_files_share_a_name() -> None:
    found = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(name for name in set(found) if found.count(name) > 1) == [], (
        "pytest would collect only one of them"
    )
