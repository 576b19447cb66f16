"""The metrics that a run exports to Prometheus."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from async_rl.config.base import replace
from async_rl.config.run import RunConfig
from async_rl.core.errors import InfrastructureError
from async_rl.launchers.configuration.reference import dashboard
from async_rl.monitoring.console import Console
from async_rl.monitoring.prometheus import Endpoint, exported_name
from async_rl.observability.catalogue import FIRST_SCREEN, METRICS, MetricKind, describe
from async_rl.observability.logs import configure_logging
from async_rl.supervision.liveness import Liveness
from async_rl.supervision.monitor import Monitor
from async_rl.supervision.registry import Registry

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
    return {(s.name, tuple(s.labels.values())): s.value for s in samples}


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    found = Endpoint("127.0.0.1", 0, lambda: (7, NEWEST | {"not/declared": 1.0}))
    yield found
    found.close()


def test_metrics_are_gauges_with_what_stands_for_a_placeholder_as_label(endpoint: Endpoint) -> None:
    assert answered(endpoint.url) == {
        ("async_rl_step", ()): 7,
        ("async_rl_reward_mean", ()): 0.5,
        ("async_rl_failures", ("over_age",)): 3,
        ("async_rl_failures", ("generator_lost",)): 1,
        ("async_rl_stage_s", ("learner", "training")): 2.5,
        ("async_rl_memory_mb_max", ("generators",)): 9,
    }


def test_a_port_in_use_is_an_error_with_the_setting(endpoint: Endpoint) -> None:
    port = int(endpoint.url.split(":")[2].split("/")[0])
    with pytest.raises(InfrastructureError, match=r"monitoring\.prometheus_port"):
        Endpoint("127.0.0.1", port, lambda: (0, {}))


def test_no_two_metrics_of_the_catalogue_have_the_same_name_in_prometheus() -> None:
    scalars = [spec for spec in METRICS.values() if spec.kind is MetricKind.SCALAR]
    names = [
        exported_name(spec.name.replace("<", "").replace(">", ""), spec)[0] for spec in scalars
    ]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("port", [None, 0])
def test_the_endpoint_is_there_if_the_run_asks_for_it(
    config: RunConfig, tmp_path: Path, port: int | None
) -> None:
    monitoring = replace(config.monitoring, prometheus_port=port, tensorboard_port=None)
    config = replace(config, monitoring=monitoring)
    log = configure_logging(tmp_path, "supervisor")
    registry = Registry()
    with Monitor(
        config,
        tmp_path,
        step=0,
        registry=registry,
        liveness=Liveness(registry, config.timeouts, is_local=True),
        console=Console(config, tmp_path),
        log=log,
    ) as monitor:
        assert bool(monitor.prometheus_url) == (port == 0)
        if port == 0:
            monitor.newest["reward/mean"] = 0.25
            monitor.step = 3
            told = answered(monitor.prometheus_url)
            assert (told["async_rl_reward_mean", ()], told["async_rl_step", ()]) == (0.25, 3)


def test_the_dashboard_asks_for_names_that_the_endpoint_has() -> None:
    asked = [
        target["expr"] for panel in json.loads(dashboard())["panels"] for target in panel["targets"]
    ]
    assert len(asked) == sum(len(names) for _, names in FIRST_SCREEN)
    assert 'async_rl_busy{role="generator"}' in asked
    newest = {name: 1.0 for _, names in FIRST_SCREEN for name in names if describe(name)}
    endpoint = Endpoint("127.0.0.1", 0, lambda: (0, newest))
    try:
        told = {
            name + (f'{{role="{labels[0]}"}}' if labels else "")
            for name, labels in answered(endpoint.url)
        }
    finally:
        endpoint.close()
    assert set(asked) <= told
