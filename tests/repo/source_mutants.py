"""Show that the tests of a promise fail when the source no longer keeps it.

usage: source_mutants.py [--slow] [PREFIX ...]   (make mutants MUTANTS="learner/ buffer/")
       source_mutants.py --list                  (the promises by file)

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

TABLE = Path(__file__).with_name("source_mutants.toml")


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


def listing() -> str:
    """Return each file with its promises, then the survivors."""
    promises: collections.defaultdict[str, list[str]] = collections.defaultdict(list)
    for row in rows():
        mark = " (survives)" if row.survives else ""
        promises[row.file].append(row.promise + mark)
    lines = [f"{file}: {'; '.join(found)}" for file, found in sorted(promises.items())]
    survivors = [f"{row.name} survives: {row.survives}" for row in rows() if row.survives]
    return "\n".join([*lines, *survivors]) + "\n"


def main() -> int:
    """Print one row per mutant; the exit status is 1 if any survives."""
    parser = argparse.ArgumentParser()
    parser.add_argument("prefixes", nargs="*", default=[""])
    parser.add_argument("--slow", action="store_true", help="run tests marked slow too")
    parser.add_argument("--list", action="store_true", help="print the promises and run nothing")
    arguments = parser.parse_args()
    if arguments.list:
        sys.stdout.write(listing())
        return 0
    chosen = [row.mutant for row in rows() if row.name.startswith(tuple(arguments.prefixes))]
    if not chosen:
        parser.error(f"no mutant of {TABLE.name} has a name that starts with {arguments.prefixes}")
    return try_all(chosen, with_slow=arguments.slow)


if __name__ == "__main__":
    sys.exit(main())
