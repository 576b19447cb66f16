"""Run tests against a changed copy of the tree, one mutant at a time, and report the survivors."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from repository import files, name
from rich.console import Console
from rich.table import Table

TIMEOUT_S = 900
TIMED_OUT = -1
OUTCOMES = {0: "SURVIVED", 1: "caught", 5: "not run", TIMED_OUT: "timed out"}
INSTALLED_INSIDE = ("launchers", "sandbox", "conf")
"""Folders that setup maps into the package `async_rl`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of a file: its path from the root, and the function from old to new text."""

    file: str
    edit: Callable[[str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """Changes that break the product, and the tests of which one must fail.

    survives: the reason why no test can notice, for the few mutants that are known to survive.
    """

    name: str
    changes: Sequence[Change]
    tests: Sequence[str]
    survives: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The tests of one mutant.

    outcome: `caught`, `SURVIVED`, `not run` (all its tests are slow and `--slow` is not given),
    `timed out`, or `broken` if pytest could not run them.
    """

    mutant: Mutant
    outcome: str
    seconds: float
    output: str

    @property
    def is_expected(self) -> bool:
        """The mutant was caught, or is known to survive."""
        return self.outcome == "caught" or (
            self.outcome == "SURVIVED" and bool(self.mutant.survives)
        )

    @property
    def reason(self) -> str:
        """The first failure, or why none was expected."""
        if self.mutant.survives:
            return self.mutant.survives
        failed = [line for line in self.output.splitlines() if line.startswith("E  ")]
        return failed[0][1:].strip()[:60] if failed else ""


def copy_tree(target: Path) -> None:
    """Copy the files of the repository, with the package laid out as it is installed."""
    for path in files():
        copy = target / name(path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    for folder in INSTALLED_INSIDE:
        (target / "async_rl" / folder).symlink_to(target / folder)


def run_tests(tree: Path, tests: Sequence[str], selection: Sequence[str]) -> tuple[int, str]:
    """Run the tests against the package in the tree; return pytest's status and output."""
    command = [sys.executable, "-m", "pytest", "-x", "-rf", "-p", "no:cacheprovider", "--timeout=0"]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *selection, *tests],
            cwd=tree,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return TIMED_OUT, ""
    return done.returncode, done.stdout


def try_mutant(mutant: Mutant, tree: Path, selection: Sequence[str]) -> Result:
    """Run the tests of a mutant in the changed tree, and restore the tree afterwards."""
    started_s = time.monotonic()
    before = {tree / change.file: (tree / change.file).read_text() for change in mutant.changes}
    for change in mutant.changes:
        path = tree / change.file
        path.write_text(change.edit(path.read_text()))
    try:
        status, output = run_tests(tree, mutant.tests, selection)
    finally:
        for path, text in before.items():
            path.write_text(text)
    outcome = OUTCOMES.get(status, "broken")
    seconds = time.monotonic() - started_s
    return Result(mutant=mutant, outcome=outcome, seconds=seconds, output=output)


def try_all(mutants: Sequence[Mutant], *, with_slow: bool) -> int:
    """Print one row per mutant; return 1 if one survives that is not known to, 2 if the tests fail
    without any mutant.
    """
    selection = [] if with_slow else ["-m", "not slow"]
    table = Table("mutant", "outcome", "tests", "seconds", "first failure")
    console = Console(width=160)
    results = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        tests = sorted({test for mutant in mutants for test in mutant.tests})
        status, output = run_tests(tree, tests, selection)
        if status not in (0, 5):
            console.print(output, markup=False)
            console.print("the tests fail without any mutation; repair them first")
            return 2
        for mutant in mutants:
            result = try_mutant(mutant, tree, selection)
            results.append(result)
            num_tests, seconds = str(len(mutant.tests)), f"{result.seconds:.0f}"
            row = (mutant.name, result.outcome, num_tests, seconds, result.reason)
            table.add_row(*row)
            console.print(*row, markup=False)
            if result.outcome == "broken":
                console.print(result.output[-2000:], markup=False)
    console.print(table)
    num_caught = sum(result.outcome == "caught" for result in results)
    console.print(f"{num_caught} of {len(results)} mutants caught")
    return 0 if all(result.is_expected for result in results) else 1
