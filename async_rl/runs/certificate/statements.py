"""One statement of a certificate, and the certificate as a report.

Invariant: a statement has the numbers behind it; without evidence it cannot be known.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from async_rl.runs.report import Report, Section, Table

Subject = Literal[
    "weights", "prompts", "selection", "log-probs", "seeds", "origin", "faults", "audit"
]
"""The part of the run that a statement is about; a certificate has them in this order."""

_MOST_LISTED = 20
# One cause usually breaks a promise in thousands of places.


class Verdict(enum.StrEnum):
    """The result of a check. unknown: the record that decides it does not exist."""

    HOLDS = "holds"
    BROKEN = "broken"
    UNKNOWN = "cannot be known"


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """A promise with its verdict. evidence: sentences, first those that decide the verdict."""

    subject: Subject
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
        counts = [
            f"{sum(each.verdict is verdict for each in self.statements)} {verdict}"
            for verdict in Verdict
        ]
        made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.made_s))
        lines = (f"made {made}; statements: {', '.join(counts)}",)
        sections = [Section(lines=lines)]
        for subject in dict.fromkeys(each.subject for each in self.statements):
            rows = []
            for each in self.statements:
                if each.subject == subject:
                    first, *others = each.evidence
                    rows.append((each.verdict.value, each.promise, first))
                    rows += [("", "", other) for other in others]
            table = Table(columns=("verdict", "statement", "evidence"), rows=tuple(rows))
            sections.append(Section(title=subject, table=table))
        return Report(title=f"certificate of {self.run}", sections=tuple(sections))


def statement(
    subject: Subject,
    promise: str,
    *,
    broken: Iterable[str] = (),
    unknown: Sequence[str] = (),
    evidence: Sequence[str] = (),
) -> Statement:
    """Return a statement that is broken if there are sentences that say so, and otherwise unknown
    if some say why it is not known.
    """
    wrong = listed(broken)
    verdict = Verdict.BROKEN if wrong else Verdict.UNKNOWN if unknown else Verdict.HOLDS
    return Statement(
        subject=subject,
        promise=promise,
        verdict=verdict,
        evidence=[*wrong, *unknown, *evidence] or ["nothing to check"],
    )


def listed(sentences: Iterable[str]) -> list[str]:
    """Return the first sentences, and the number of the others."""
    every = list(sentences)
    left = len(every) - _MOST_LISTED
    return [*every[:_MOST_LISTED], f"and {left} more"] if left > 0 else every


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text: 3, 5 to 9."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in spans)


def at(unix_s: float) -> str:
    """Return a time as text."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(unix_s))
