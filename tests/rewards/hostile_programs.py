"""The cases of hostile_programs.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rewards_support import corpus

from async_rl.core.types import Verdict


@dataclass(frozen=True)
class Case:
    name: str
    family: str
    code: str
    right: tuple[Verdict, ...]
    is_stdin: bool


def _case(family: str, row: dict[str, Any]) -> Case:
    right = row.get("right", "pass")
    return Case(
        name=row["name"],
        family=family,
        code=row["code"],
        right=tuple(map(Verdict, [right] if isinstance(right, str) else right)),
        is_stdin=row.get("is_stdin", False),
    )


_ROWS = corpus("hostile_programs")
CASES = [_case(family, row) for family, rows in _ROWS["hostile"].items() for row in rows]
HONEST = [_case("honest", row) for row in _ROWS["honest"]]
