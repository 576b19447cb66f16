"""The metrics that a run exports to Prometheus."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from async_rl.core.errors import InfrastructureError
from async_rl.monitoring.prometheus import Endpoint, exported_name
from async_rl.observability.catalogue import FIRST_SCREEN, METRICS
from async_rl.supervision.monitor import Monitor
from docs.generate.pages import dashboard

NEWEST = {
    "reward/mean": 0.5,
    "failures/over_age": 3.0,
    "failures/generator_lost": 1.0,
    "stage_s/learner/training": 2.5,
    "memory/generators_mb_max": 9.0,
}


def answered(url: str) -> dict[tuple[str, tuple[str, ...]], float]:
    with urllib.request.urlopen(url, timeout=5) as response:
        text = response.read().decode()
    samples = (s for family in text_string_to_metric_families(text) for s in family.samples)
    return {(s.name, _run_first(s.labels)): s.value for s in samples}


def _run_first(labels: Mapping[str, str]) -> tuple[str, ...]:
    return (labels["run"], *(value for name, value in labels.items() if name != "run"))


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    found = Endpoint("127.0.0.1", 0, "mine", lambda: (7, NEWEST | {"not/declared": 1.0}))
    yield found
    found.close()


def test_metrics_are_gauges_of_the_run(endpoint: Endpoint) -> None:
    assert answered(endpoint.url) == {
        ("async_rl_step", ("mine",)): 7,
        ("async_rl_reward_mean", ("mine",)): 0.5,
        ("async_rl_failures_over_age", ("mine",)): 3,
        ("async_rl_failures_generator_lost", ("mine",)): 1,
        ("async_rl_stage_s_learner_training", ("mine",)): 2.5,
        ("async_rl_memory_generators_mb_max", ("mine",)): 9,
    }


@pytest.mark.parametrize(
    "path", ["", "/", "/metrics", "/x/metrics", "/{secret}", "/{secret}/metrics/x"]
)
def test_only_who_knows_the_path_reads_metrics(endpoint: Endpoint, path: str) -> None:
    address, secret, _ = endpoint.url.rsplit("/", 2)
    assert len(secret) > 20
    with pytest.raises(urllib.error.HTTPError, match="404") as refused:
        answered(address + path.format(secret=secret))
    assert refused.value.read() == b""


def test_a_port_in_use_is_an_error_with_the_setting(endpoint: Endpoint) -> None:
    port = int(endpoint.url.split(":")[2].split("/")[0])
    with pytest.raises(InfrastructureError, match=r"monitoring\.prometheus_port"):
        Endpoint("127.0.0.1", port, "mine", lambda: (0, {}))


def test_no_two_metrics_of_the_catalogue_have_the_same_name_in_prometheus() -> None:
    scalars = [name for name, spec in METRICS.items() if spec.unit != "text"]
    names = [exported_name(name) for name in scalars]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("port", [None, 0])
def test_the_endpoint_is_there_if_the_run_asks_for_it(
    monitor_of: Callable[..., Monitor], tmp_path: Path, port: int | None
) -> None:
    with monitor_of(prometheus_port=port) as monitor:
        assert bool(monitor.prometheus_url) == (port == 0)
        if port == 0:
            monitor.newest["reward/mean"] = 0.25
            monitor.step = 3
            told = answered(monitor.prometheus_url)
            run = (tmp_path.name,)
            assert (told["async_rl_reward_mean", run], told["async_rl_step", run]) == (0.25, 3)


def test_the_dashboard_asks_for_names_that_the_endpoint_has() -> None:
    page = json.loads(dashboard())
    asked = [target["expr"] for panel in page["panels"] for target in panel["targets"]]
    assert len(asked) == sum(len(chart.metrics) for chart in FIRST_SCREEN.values())
    assert 'async_rl_busy_generator{run=~"$run"}' in asked
    newest = {name: 1.0 for chart in FIRST_SCREEN.values() for name in chart.metrics}
    endpoint = Endpoint("127.0.0.1", 0, "mine", lambda: (0, newest))
    try:
        told = {name + '{run=~"$run"}' for name, _ in answered(endpoint.url)}
    finally:
        endpoint.close()
    assert set(asked) <= told


def test_the_dashboard_has_units_meanings_and_a_variable_for_the_run() -> None:
    page = json.loads(dashboard())
    assert [variable["name"] for variable in page["templating"]["list"]] == ["source", "run"]
    assert page["templating"]["list"][1]["query"] == "label_values(async_rl_step, run)"
    panel = page["panels"][1]
    assert panel["title"] == "2 held-out pass@1 [share]"
    assert panel["fieldConfig"]["defaults"]["unit"] == "percentunit"
    assert "memorizes the prompts" in panel["description"]
    assert "eval/pass_at_1: held-out samples that pass" in panel["description"]
    assert panel["targets"][0]["legendFormat"] == "{{run}} eval/pass_at_1"
