"""Show that the tests of a promise fail when the source no longer keeps it.

usage: source_mutants.py [--slow] [PREFIX ...]   (make mutants MUTANTS="learner/ buffer/")
       source_mutants.py --page                  (writes docs/mutants.md)

`source_mutants.toml` is the table. A row names a file, a snippet that occurs in it exactly once,
the snippet that replaces it, and the tests of which one must fail. A row whose mutant no test can
notice has `survives`, the reason.
"""

from __future__ import annotations

import argparse
import collections
import functools
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec
from mutation import Change, Mutant, try_all
from repository import ROOT

TABLE = Path(__file__).with_name("source_mutants.toml")
PAGE = ROOT / "docs" / "mutants.md"
INTRODUCTION = """\
# Mutants

A mutant is a change of the source that breaks a promise. `make mutants` applies each one to a copy
of the tree and runs the tests that must fail; `make mutants MUTANTS="buffer/"` runs those of one
area. The table is `tests/repo/source_mutants.toml`, from which
`python tests/repo/source_mutants.py --page` makes this page.
"""


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of the table. name: `area/fact`; promise: what a user would lose."""

    name: str
    promise: str
    file: str
    original: str
    changed: str
    tests: list[str]
    survives: str = ""

    @property
    def mutant(self) -> Mutant:
        """The row as a mutant of the tree."""
        change = Change(file=self.file, edit=self.edit)
        return Mutant(name=self.name, changes=[change], tests=self.tests, survives=self.survives)

    def edit(self, text: str) -> str:
        """Replace the snippet. Raises ValueError unless it occurs exactly once."""
        count = text.count(self.original)
        if count != 1:
            raise ValueError(
                f"mutant {self.name}: its snippet occurs {count} times in {self.file}, expected"
                f" once; bring the row in {TABLE.name} up to date:\n{self.original}"
            )
        return text.replace(self.original, self.changed)


@functools.cache
def rows() -> Sequence[Row]:
    """Return the rows of the table."""
    with TABLE.open("rb") as file:
        return msgspec.convert(tomllib.load(file)["mutant"], list[Row])


def page() -> str:
    """Return the page of the documents: each file with its promises, then the survivors."""
    promises: collections.defaultdict[str, list[str]] = collections.defaultdict(list)
    for row in rows():
        mark = " (survives)" if row.survives else ""
        promises[row.file].append(row.promise + mark)
    survivors = [row for row in rows() if row.survives]
    lines = [INTRODUCTION, "| file | mutants | promises |", "|---|---|---|"]
    for file, found in sorted(promises.items()):
        lines.append(f"| `{file}` | {len(found)} | {'; '.join(found)} |")
    lines.append(f"| {len(promises)} files | {len(rows())} | {len(survivors)} survive |")
    lines += ["", "Survivors, and why no test can notice them:", ""]
    lines += [f"- `{row.name}`: {row.survives}" for row in survivors]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print one row per mutant; the exit status is 1 if any survives."""
    parser = argparse.ArgumentParser()
    parser.add_argument("prefixes", nargs="*", default=[""])
    parser.add_argument("--slow", action="store_true", help="run tests marked slow too")
    parser.add_argument("--page", action="store_true", help="write docs/mutants.md and run nothing")
    arguments = parser.parse_args()
    if arguments.page:
        PAGE.write_text(page())
        return 0
    chosen = [row.mutant for row in rows() if row.name.startswith(tuple(arguments.prefixes))]
    if not chosen:
        parser.error(f"no mutant of {TABLE.name} has a name that begins with {arguments.prefixes}")
    return try_all(chosen, with_slow=arguments.slow)


if __name__ == "__main__":
    sys.exit(main())
