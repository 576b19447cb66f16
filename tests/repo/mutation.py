"""Run tests against a changed copy of the tree, one mutant at a time, and print which survive."""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from repository import files, name

TIMEOUT_S = 900
OUTCOMES = {0: "SURVIVED", 1: "caught", 5: "not run"}
"""By pytest's status. Not run: all tests of the mutant are slow and `--slow` is not given."""
INSTALLED_INSIDE = ("launchers", "sandbox", "conf")
"""Folders that setup maps into the package `async_rl`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A change that breaks the product, and the tests of which one must fail.

    edits: by file, a function from old to new text. survives: the reason why no test can notice,
    for the few mutants that are known to survive.
    """

    name: str
    edits: Mapping[str, Callable[[str], str]]
    tests: Sequence[str]
    survives: str = ""


def copy_tree(target: Path) -> None:
    """Copy the files of the repository, with the package laid out as it is installed."""
    for path in files():
        copy = target / name(path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    for folder in INSTALLED_INSIDE:
        (target / "async_rl" / folder).symlink_to(target / folder)


@contextlib.contextmanager
def planted(mutant: Mutant, tree: Path) -> Iterator[None]:
    """Change the tree, and restore it afterwards."""
    before = {tree / file: (tree / file).read_text() for file in mutant.edits}
    try:
        for file, edit in mutant.edits.items():
            (tree / file).write_text(edit((tree / file).read_text()))
        yield
    finally:
        for path, text in before.items():
            path.write_text(text)


def run_tests(tree: Path, tests: Sequence[str], *, with_slow: bool) -> tuple[str, str]:
    """Run the tests against the package in the tree; return the outcome and pytest's output."""
    command = [sys.executable, "-m", "pytest", "-x", "-rf", "-p", "no:cacheprovider", "--timeout=0"]
    selection = [] if with_slow else ["-m", "not slow"]
    try:
        done = subprocess.run(
            [*command, *selection, *tests],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return "timed out", ""
    return OUTCOMES.get(done.returncode, "broken"), done.stdout


def try_all(mutants: Sequence[Mutant], *, with_slow: bool) -> int:
    """Print one row per mutant; return 1 if one survives that is not known to, 2 if the tests fail
    without any mutant.
    """
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        tests = sorted({test for mutant in mutants for test in mutant.tests})
        outcome, output = run_tests(tree, tests, with_slow=with_slow)
        if outcome not in ("SURVIVED", "not run"):
            _say(f"{output}\nthe tests fail without any mutation; repair them first")
            return 2
        for mutant in mutants:
            started_s = time.monotonic()
            with planted(mutant, tree):
                outcome, output = run_tests(tree, mutant.tests, with_slow=with_slow)
            failures = [line[1:].strip() for line in output.splitlines() if line.startswith("E  ")]
            why = mutant.survives or "".join(failures[:1])
            _say(f"{mutant.name:50} {outcome:9} {time.monotonic() - started_s:4.0f} s  {why[:80]}")
            if outcome == "broken":
                _say(output[-2000:])
            outcomes.append((outcome, bool(mutant.survives)))
    num_caught = sum(outcome == "caught" for outcome, _ in outcomes)
    _say(f"{num_caught} of {len(mutants)} mutants caught")
    expected = {("caught", False), ("caught", True), ("SURVIVED", True)}
    return int(not expected.issuperset(outcomes))


def main(description: str | None, mutants: Mapping[str, Callable[[], Mutant]]) -> int:
    """Try the mutants whose names start with one of the words of the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("prefixes", nargs="*", default=[""])
    parser.add_argument("--slow", action="store_true", help="run tests marked slow too")
    arguments = parser.parse_args()
    prefixes = tuple(arguments.prefixes)
    chosen = [make() for name, make in mutants.items() if name.startswith(prefixes)]
    if not chosen:
        parser.error(f"no mutant has a name that starts with {arguments.prefixes}")
    return try_all(chosen, with_slow=arguments.slow)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
