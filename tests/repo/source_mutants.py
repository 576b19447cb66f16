"""Show that the tests of a promise fail when the source no longer keeps it.

usage: source_mutants.py [--slow] [PREFIX ...]   (make mutants MUTANTS="learner/ buffer/")

`source_mutants.toml` is the table. A row names a file, a snippet that occurs in it exactly once,
the snippet that replaces it, and the tests of which one must fail. A row whose mutant no test can
notice has `survives`, the reason.
"""

import functools
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec
from mutation import Mutant, main

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

    def mutant(self) -> Mutant:
        """The row as a mutant of the tree."""
        edits = {self.file: self.edit}
        return Mutant(name=self.name, edits=edits, tests=self.tests, survives=self.survives)

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


if __name__ == "__main__":
    sys.exit(main(__doc__, {row.name: row.mutant for row in rows()}))
