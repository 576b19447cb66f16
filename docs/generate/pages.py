"""Generation of files in docs/: configuration.md from the schema; metrics.md and the Grafana
dashboard grafana.json from the catalogue; the plans in hardware.md from the planner; the families
in models.md; messages.md from the protocol; parameters.md from the table of the endpoint.

    make docs

writes them; tests/repo/test_reference.py fails if they are out of date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from async_rl.composition.schema import json_schema
from async_rl.monitoring.exports import exported_name
from async_rl.observability.catalogue import (
    FIRST_SCREEN,
    METRICS,
    MetricSpec,
    describe,
    with_unit,
)
from benchmarks.qualification.catalogue import hardware_page
from docs.generate.families import models_page
from docs.generate.messages import messages_page
from docs.generate.parameters import parameters_page
from docs.generate.plans import with_plans
from docs.generate.settings import settings_page, table

_PANEL_WIDTH, _PANEL_HEIGHT = 12, 8  # of Grafana's grid, 24 wide
_GRAFANA_UNITS = {"share": "percentunit", "s": "s"}
"""Grafana's names of our units; the others are plain numbers."""

_HEAD = """# Metrics

`make docs` generates this page from `async_rl/observability/catalogue.toml`; edit that file. The
names are TensorBoard's tags and the keys of a run's `metrics.jsonl`, which has one JSON object per
learner step. A part in angle brackets is replaced at run time, for example by the name of a role.
Seconds and shares of a role or pool are means over its processes.

With `monitoring.prometheus_port` (0 = a free port) Prometheus can scrape a run at the link that the
launch prints; its path is a secret, and goes into `metrics_path` of the scraper's configuration.
`failures/over_age` is `async_rl_failures_over_age`, with the name of the run's directory as the
label `run`. [grafana.json](grafana.json) is a dashboard to import.

## The ten numbers to watch

TensorBoard's first page, *Custom Scalars*, and the dashboard.
"""


_HARDWARE = Path(__file__).resolve().parents[2] / "docs" / "hardware.md"
"""Written by hand except for the table of qualifications."""


def pages() -> dict[str, str]:
    """The text of each page by its file name."""
    return {
        "configuration.md": settings_page(),
        "configuration.schema.json": json.dumps(json_schema(), indent=1) + "\n",
        "metrics.md": metrics_page(),
        "messages.md": messages_page(),
        "grafana.json": dashboard(),
        "models.md": models_page(),
        "parameters.md": parameters_page(),
        "hardware.md": with_plans(hardware_page(_HARDWARE.read_text())),
    }


def dashboard() -> str:
    """A Grafana dashboard with the charts of TensorBoard's first page, for the endpoint of
    monitoring.prometheus_port.
    """
    panels = []
    for number, (title, chart) in enumerate(FIRST_SCREEN.items()):
        names = chart.metrics
        unit = _spec(names[0]).unit
        targets = [
            {"refId": "ABCDEFG"[i], "expr": _expression(name), "legendFormat": "{{run}} " + name}
            for i, name in enumerate(names)
        ]
        position = {
            "x": _PANEL_WIDTH * (number % 2),
            "y": _PANEL_HEIGHT * (number // 2),
            "w": _PANEL_WIDTH,
            "h": _PANEL_HEIGHT,
        }
        source = {"type": "prometheus", "uid": "${source}"}
        panels.append(
            {
                "id": number + 1,
                "type": "timeseries",
                "title": with_unit(title, names[0]),
                "description": "\n".join([chart.reading, *map(_meaning, names)]),
                "datasource": source,
                "fieldConfig": {"defaults": {"unit": _GRAFANA_UNITS.get(unit, "short")}},
                "gridPos": position,
                "targets": targets,
            }
        )
    variable = {
        "name": "source",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
    }
    run = {
        "name": "run",
        "label": "Run",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": f"label_values({exported_name('step')}, run)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
    }
    page = {
        "title": "async-rl: the ten numbers to watch",
        "uid": "async-rl",
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [variable, run]},
        "panels": panels,
    }
    return json.dumps(page, indent=1) + "\n"


def _expression(name: str) -> str:
    return f'{exported_name(name)}{{run=~"$run"}}'


def _spec(name: str) -> MetricSpec:
    spec = describe(name)
    assert spec is not None, f"{name} is not in the catalogue"
    return spec


def _meaning(name: str) -> str:
    return f"{name}: {_spec(name).description}"


def metrics_page() -> str:
    """Every declared metric with its unit and meaning, by name."""
    charts = [
        (title, ", ".join(f"`{n}`" for n in chart.metrics), chart.reading)
        for title, chart in FIRST_SCREEN.items()
    ]
    rows = [(f"`{name}`", spec.unit, spec.meaning) for name, spec in sorted(METRICS.items())]
    parts = [
        _HEAD,
        table(("chart", "metrics", "how to read it"), charts),
        "\n## All metrics\n",
        table(("metric", "unit", "meaning"), rows),
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    """Write the pages into the given folder."""
    for name, text in pages().items():
        (Path(sys.argv[1]) / name).write_text(text)


if __name__ == "__main__":
    main()
