"""The pages of docs/ that are made from code: docs/metrics.md from the catalogue of metrics.

    make docs

writes them; tests/repo/test_reference.py fails if they are not what this makes.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from async_rl.observability.catalogue import FIRST_SCREEN, METRICS, MetricKind, MetricSpec

_HEAD = """# Metrics

Made from `async_rl/observability/catalogue.py` by `make docs`; change it there. Names are TensorBoard's tags and the keys of a run's
`metrics.jsonl`, which holds the scalars: one JSON object per learner step. A part in angle brackets stands for one name that is known only
when the run is there.

## The ten numbers to watch

TensorBoard's first page, *Custom Scalars*.
"""


def pages() -> dict[str, str]:
    """The text of each page by its file name."""
    return {"metrics.md": metrics_page()}


def metrics_page() -> str:
    """Every declared metric with its unit and meaning, by group."""
    parts = [_HEAD, _table(("chart", "metrics"), [(title, ", ".join(f"`{n}`" for n in names)) for title, names in FIRST_SCREEN])]
    by_group = sorted(METRICS.values(), key=_group)
    for group, specs in itertools.groupby(by_group, key=_group):
        rows = [(f"`{s.name}`", s.unit if s.kind is not MetricKind.HISTOGRAM else f"histogram of {s.unit}", s.meaning) for s in specs]
        parts += [f"\n## {group}\n", _table(("metric", "unit", "meaning"), rows)]
    return "\n".join(parts) + "\n"


def _group(spec: MetricSpec) -> str:
    return spec.name.partition("/")[0]


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def main() -> None:
    """Writes the pages into the folder given."""
    for name, text in pages().items():
        (Path(sys.argv[1]) / name).write_text(text)


if __name__ == "__main__":
    main()
