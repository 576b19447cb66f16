"""One statement of a certificate, and the certificate as a report.

Invariant: a statement has the numbers behind it; without evidence it cannot be known.
"""

import enum
import time
from collections.abc import Iterable

import msgspec

from async_rl.runs.report import Report, Section, Table

_MOST_LISTED = 20
"""Sentences of one kind: one cause usually breaks a promise in thousands of places."""


class Verdict(enum.StrEnum):
    """The result of a check. unknown: the record that decides it does not exist."""

    HOLDS = "holds"
    BROKEN = "broken"
    UNKNOWN = "cannot be known"


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """A promise with its verdict. subject: the part of the run that it is about. evidence:
    sentences, first those that decide the verdict.
    """

    subject: str
    promise: str
    verdict: Verdict
    evidence: list[str]


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """All statements about a run. made_s: Unix time."""

    run: str
    made_s: float
    statements: list[Statement]

    @property
    def broken(self) -> list[Statement]:
        """The statements that do not hold."""
        return [each for each in self.statements if each.verdict is Verdict.BROKEN]

    def report(self) -> Report:
        """Return the certificate for the terminal and for the web view."""
        rows: list[tuple[str, ...]] = []
        for each in self.statements:
            head = (each.verdict.value, each.subject, each.promise)
            for sentence in each.evidence:
                rows.append((*head, sentence))
                head = ("", "", "")
        verdicts = [each.verdict for each in self.statements]
        counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in Verdict)
        table = Table(columns=("verdict", "about", "statement", "evidence"), rows=tuple(rows))
        lines = [f"made {at(self.made_s)} UTC; statements: {counts}"]
        lines += [f"broken: {each.promise}" for each in self.broken]
        section = Section(lines=tuple(lines), table=table)
        return Report(title=f"certificate of {self.run}", sections=(section,))


def statement(
    subject: str,
    promise: str,
    *,
    broken: Iterable[str] = (),
    unknown: Iterable[str] = (),
    evidence: Iterable[str] = (),
) -> Statement:
    """Return a statement that is broken if there are sentences that say so, and otherwise unknown
    if some say why it is not known.
    """
    wrong = listed(broken)
    gaps = listed(unknown)
    verdict = Verdict.UNKNOWN if gaps else Verdict.HOLDS
    if wrong:
        verdict = Verdict.BROKEN
    sentences = [*wrong, *gaps, *evidence]
    return Statement(subject=subject, promise=promise, verdict=verdict, evidence=sentences)


def listed(sentences: Iterable[str]) -> list[str]:
    """Return the first sentences, and the number of the others."""
    every = list(sentences)
    left = len(every) - _MOST_LISTED
    if left > 0:
        return [*every[:_MOST_LISTED], f"and {left} more"]
    return every


def at(unix_s: float) -> str:
    """Return a time as text."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(unix_s))
