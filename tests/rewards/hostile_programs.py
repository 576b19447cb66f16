"""The cases of hostile_programs.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from async_rl.core.types import Verdict
from async_rl.sandbox.protocol import NAMESPACES


@dataclass(frozen=True)
class Case:
    name: str
    family: str
    code: str
    right: tuple[Verdict, ...]
    is_stdin: bool

    def works_at(self, level: int) -> bool:
        """Return whether an honest program of this kind can work: a scratch needs namespaces."""
        return self.name != "scratch file" or level == NAMESPACES


def _case(family: str, row: dict[str, Any]) -> Case:
    right = row.get("right", "pass")
    return Case(
        name=row["name"],
        family=family,
        code=row["code"],
        right=tuple(map(Verdict, [right] if isinstance(right, str) else right)),
        is_stdin=row.get("is_stdin", False),
    )


_ROWS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
CASES = [_case(family, row) for family, rows in _ROWS["hostile"].items() for row in rows]
HONEST = [_case("honest", row) for row in _ROWS["honest"]]
