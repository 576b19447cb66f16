"""Every metric of a run, declared once with its unit and meaning.

The table is catalogue.toml. Names are TensorBoard tags and the keys of metrics.jsonl. A part in
angle brackets matches one path element that is known only at run time (`failures/<reason>`). The
tests refuse a name that the table does not declare; docs and dashboards are generated from it.
"""

import functools
import re
from collections.abc import Mapping

from async_rl.core.frozen import Value
from async_rl.core.records import read_packaged


class Chart(Value):
    """One of the ten charts. reading: its expected look, and the remedy if it differs."""

    metrics: tuple[str, ...]
    reading: str


class MetricSpec(Value, array_like=True):
    """One declared metric: a line of the table. unit: `text` for an event of the run."""

    unit: str
    meaning: str

    @property
    def description(self) -> str:
        """Meaning and unit."""
        return f"{self.meaning} ({self.unit})"


_SECTIONS = read_packaged(__package__, "catalogue.toml", dict[str, dict[str, MetricSpec]])
METRICS: Mapping[str, MetricSpec] = {
    f"{section}/{part}": spec
    for section, specs in _SECTIONS.items()
    for part, spec in specs.items()
}
"""All declared metrics by name; a name may contain placeholders."""

FIRST_SCREEN = read_packaged(__package__, "first_screen.toml", dict[str, Chart])
"""The ten charts to watch, by title."""


# The supervisor requests every gauge of every process once per second. The limit is for names that
# are not declared: the messages of other processes must not fill the memory.
@functools.lru_cache(maxsize=4096)
def describe(name: str) -> MetricSpec | None:
    """Return the declaration of `name`, or None. An exact one wins over one with placeholders."""
    return next((spec for pattern, spec in _patterns() if pattern.fullmatch(name)), None)


def with_unit(title: str, name: str) -> str:
    """Return the title with the unit of the metric in brackets, without one if it is a number."""
    spec = describe(name)
    if spec is None or spec.unit == "1":
        return title
    return f"{title} [{spec.unit}]"


@functools.cache
def _patterns() -> list[tuple[re.Pattern[str], MetricSpec]]:
    """The names as patterns, the exact ones first. None matches a placeholder itself."""
    return [
        (re.compile(re.sub("<[a-z]+>", "[^/<>]+", name)), METRICS[name])
        for name in sorted(METRICS, key=lambda name: "<" in name)
    ]
