"""The verdict of a JUnit report (pytest's --junitxml, and many others). Pure.

The report is hostile: a document type is refused, since entities could expand without end, and
reading takes time in proportion to its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.parsers import expat

_NAMED = 3


class _Cases:
    """Names of the cases by outcome; a name with a failure is not among the passed."""

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.failed: set[str] = set()
        self._name = ""
        self._is_run = True

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        if tag == "testcase":
            group, name = attributes.get("classname", ""), attributes.get("name", "")
            self._name, self._is_run = f"{group}.{name}" if group else name, True
        elif tag in ("failure", "error") and self._name:
            self.failed.add(self._name)
        elif tag == "skipped":
            self._is_run = False

    def end(self, tag: str) -> None:
        if tag == "testcase":
            if self._is_run:
                self.passed.add(self._name)
            self._name = ""


def failure(report: bytes, passing: Sequence[str], failing: Sequence[str]) -> str:
    """The reason why the report shows a wrong program; empty if the program is right.

    passing: cases that must pass, empty for all, at least one; failing: cases that must fail.
    """
    cases, parser = _Cases(), expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = cases.start, cases.end
    # Entities are declared in a document type.
    parser.StartDoctypeDeclHandler = _refuse
    try:
        parser.Parse(report, True)
    except (expat.ExpatError, ValueError) as error:
        return f"the report cannot be read: {error}"
    passed = cases.passed - cases.failed
    missed = set(passing) - passed
    if not passing:
        missed = cases.failed - set(failing)
        if not missed and not passed:
            return "no test of the report passed"
    if missed:
        return f"{len(missed)} of the tests did not pass: {_some(missed)}"
    forged = set(failing) - cases.failed
    if forged:
        return f"tests that must fail did not: {_some(forged)}"
    return ""


def _refuse(*_: object) -> None:
    raise ValueError("it has a document type")


def _some(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:_NAMED])
    return shown[:200].encode("ascii", "backslashreplace").decode()
