"""The list of qualifications (catalogue.toml), the reasons to skip one, and its page in docs/."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from async_rl.core.extras import missing


class Limit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A bound of one measured number."""

    number: str
    at_most: float | None = None
    at_least: float | None = None
    unit: str = ""

    def __str__(self) -> str:
        sign, bound = ("<=", self.at_most) if self.at_most is not None else (">=", self.at_least)
        return f"{self.number} {sign} {bound:g} {self.unit}".strip()

    def is_kept(self, numbers: Mapping[str, float]) -> bool:
        """Return whether the number was measured and is within the bound; NaN is not."""
        if self.number not in numbers:
            return False
        value = numbers[self.number]
        low = value >= self.at_least if self.at_least is not None else True
        high = value <= self.at_most if self.at_most is not None else True
        return low and high and value == value


class Qualification(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry; catalogue.toml describes the fields."""

    name: str
    title: str
    check: str
    limits: list[Limit]
    limit_s: float
    settings: list[str] = []
    packages: list[str] = []
    gpus: int = 0
    nodes: int = 1

    @property
    def needs(self) -> str:
        """The required devices and packages, in words."""
        if self.nodes > 1:
            return f"a Ray cluster of {self.nodes} machines"
        gpus = [f"{self.gpus} GPU" + ("s" if self.gpus > 1 else "")] if self.gpus else []
        return ", ".join([*gpus, *self.packages]) or "nothing"


class _Catalogue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    qualification: list[Qualification]


@functools.cache
def qualifications() -> tuple[Qualification, ...]:
    """Return the list."""
    tree = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text())
    return tuple(msgspec.convert(tree, _Catalogue).qualification)


def reason_to_skip(entry: Qualification, *, num_gpus: int, num_nodes: int) -> str:
    """Return why the entry cannot run here, or an empty string."""
    if entry.nodes > num_nodes:
        return (
            f"it needs {entry.needs}, and {num_nodes} answered; join the machines with `ray start`"
            " and set RAY_ADDRESS"
        )
    if entry.gpus > num_gpus:
        return f"it needs {entry.needs}, and this environment can use {num_gpus}"
    return next(filter(None, (missing(package, "it") for package in entry.packages)), "")


def engine_settings() -> list[str]:
    """Return the settings of the installed engine: of transformers without vLLM."""
    return ["generation.engine=hf"] if missing("vllm", "") else []


_BEGIN = "<!-- qualifications: written by make docs -->\n"
_END = "<!-- end of qualifications -->\n"


def hardware_page(page: str) -> str:
    """Return docs/hardware.md with the table of the list between its two markers."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    rows = [
        f"| `{entry.name}` | {entry.title} | {entry.needs} | {', '.join(map(str, entry.limits))} |"
        for entry in qualifications()
    ]
    head = "| name | what it shows | needs | limits |\n|---|---|---|---|\n"
    return before + _BEGIN + head + "\n".join(rows) + "\n" + _END + after
