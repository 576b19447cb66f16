"""The table of source mutants fits the source: each snippet occurs once, each test exists."""

import ast
import functools
from collections import Counter

import pytest
from repository import ROOT
from source_mutants import Row, rows

MAX_SURVIVORS = 3


@functools.cache
def functions_of(file: str) -> frozenset[str]:
    """The functions at the top level of a test module."""
    nodes = ast.parse((ROOT / file).read_text()).body
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return frozenset(node.name for node in nodes if isinstance(node, kinds))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_the_snippet_of_a_mutant_occurs_once_and_its_tests_exist(row: Row) -> None:
    text = (ROOT / row.file).read_text()
    assert row.edit(text) != text
    if row.file.endswith(".py"):
        ast.parse(row.edit(text))
    assert row.tests
    for test in row.tests:
        file, _, function = test.partition("::")
        assert not function or function.partition("[")[0].partition("::")[0] in functions_of(file)
        assert (ROOT / file).is_file(), file


def test_a_snippet_that_does_not_occur_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"its snippet occurs 0 times in .*, expected once"):
        rows()[0].edit("something else")


def test_mutants_have_names_of_their_own_and_few_may_survive() -> None:
    assert [name for name, count in Counter(row.name for row in rows()).items() if count > 1] == []
    assert len([row for row in rows() if row.survives]) <= MAX_SURVIVORS
    assert len(rows()) >= 100
