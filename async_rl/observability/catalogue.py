"""Every metric of a run, declared once with its unit and meaning.

The table is catalogue.toml. Names are TensorBoard tags and the keys of metrics.jsonl. A part in
angle brackets matches one path element that is known only at run time (`failures/<reason>`). The
metrics writer refuses a name that the table does not declare; docs and dashboards are generated
from it.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Mapping
from importlib import resources
from typing import Annotated

import msgspec

_Text = Annotated[str, msgspec.Meta(min_length=1)]
_Name = Annotated[str, msgspec.Meta(pattern="^[a-z0-9_<>/]+$")]


class MetricKind(enum.StrEnum):
    """How a metric is recorded."""

    SCALAR = "scalar"
    HISTOGRAM = "histogram"
    TEXT = "text"


class _Row(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One line of the table."""

    unit: _Text
    meaning: _Text
    kind: MetricKind = MetricKind.SCALAR


class MetricSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One declared metric."""

    name: str
    unit: str
    meaning: str
    kind: MetricKind


def _load() -> dict[str, MetricSpec]:
    """Read the table. Raises msgspec.ValidationError, with the path, for a malformed line."""
    text = resources.files(__package__).joinpath("catalogue.toml").read_bytes()
    sections = msgspec.toml.decode(text, type=dict[_Name, dict[_Name, _Row]])
    specs: dict[str, MetricSpec] = {}
    for section, rows in sections.items():
        for part, row in rows.items():
            name = f"{section}/{part}"
            specs[name] = MetricSpec(name=name, unit=row.unit, meaning=row.meaning, kind=row.kind)
    return specs


METRICS: Mapping[str, MetricSpec] = _load()
"""All declared metrics by name; a name may contain placeholders."""

FIRST_SCREEN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("1 reward", ("reward/mean",)),
    ("2 held-out pass@1", ("eval/pass_at_1",)),
    ("3 staleness", ("staleness/max_versions", "staleness/mean_versions")),
    ("4 effective sample size", ("policy/effective_sample_size",)),
    ("5 KL", ("policy/kl_behavior_proximal", "policy/kl_reference")),
    ("6 entropy", ("policy/entropy",)),
    ("7 response length", ("length/response_mean", "length/response_max")),
    (
        "8 tokens per second",
        ("throughput/generated_tokens_per_s", "throughput/trained_tokens_per_s"),
    ),
    ("9 who works", ("busy/generator", "busy/learner", "busy/verifier")),
    ("10 weight push", ("weights/push_s", "weights/pause_s")),
)
"""The ten numbers to watch: title of the chart and its metrics."""


def describe(name: str) -> MetricSpec | None:
    """Return the declaration of `name`, or None. An exact one wins over one with placeholders."""
    exact = METRICS.get(name)
    if exact is not None:
        return exact if "<" not in name else None
    for pattern, spec in _patterns():
        if pattern.fullmatch(name):
            return spec
    return None


@functools.cache
def _patterns() -> tuple[tuple[re.Pattern[str], MetricSpec], ...]:
    return tuple((_pattern(name), spec) for name, spec in METRICS.items() if "<" in name)


def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"<[a-z]+>", name)
    return re.compile("[^/<>]+".join(re.escape(part) for part in parts))
