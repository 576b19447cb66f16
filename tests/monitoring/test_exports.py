"""The numbers of a run for Prometheus and for Weights & Biases."""

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from async_rl.config.run import RunConfig
from async_rl.core.errors import InfrastructureError
from async_rl.monitoring.exports import Endpoint, WandbRun, exported_name
from async_rl.observability.catalogue import FIRST_SCREEN, METRICS
from async_rl.supervision.monitor import Monitor
from docs.generate.pages import dashboard

NEWEST = {
    "reward/mean": 0.5,
    "failures/over_age": 3.0,
    "stage_s/learner/training": 2.5,
    "not/declared": 1.0,
}


def answered(url: str) -> dict[tuple[str, tuple[str, ...]], float]:
    with urllib.request.urlopen(url, timeout=5) as response:
        text = response.read().decode()
    samples = (s for family in text_string_to_metric_families(text) for s in family.samples)
    return {(s.name, tuple(s.labels.values())): s.value for s in samples}


def test_metrics_are_gauges_of_the_run_for_who_knows_the_path() -> None:
    endpoint = Endpoint("127.0.0.1", 0, "mine", lambda: (7, NEWEST))
    try:
        assert answered(endpoint.url) == {
            ("async_rl_step", ("mine",)): 7,
            ("async_rl_reward_mean", ("mine",)): 0.5,
            ("async_rl_failures_over_age", ("mine",)): 3,
            ("async_rl_stage_s_learner_training", ("mine",)): 2.5,
        }
        address, secret, _ = endpoint.url.rsplit("/", 2)
        assert len(secret) > 20
        for path in ("", "/", "/metrics", "/x/metrics", f"/{secret}", f"/{secret}/metrics/x"):
            with pytest.raises(urllib.error.HTTPError, match="404") as refused:
                answered(address + path)
            assert refused.value.read() == b""
        port = int(address.rpartition(":")[2])
        with pytest.raises(InfrastructureError, match=r"monitoring\.prometheus_port"):
            Endpoint("127.0.0.1", port, "mine", lambda: (0, {}))
    finally:
        endpoint.close()


def test_a_run_has_an_endpoint_if_it_asks(
    monitor_of: Callable[..., Monitor], tmp_path: Path
) -> None:
    with monitor_of(prometheus_port=None) as monitor:
        assert not monitor.prometheus_url
    with monitor_of(prometheus_port=0) as monitor:
        monitor.newest["reward/mean"] = 0.25
        monitor.step = 3
        told = answered(monitor.prometheus_url)
        run = (tmp_path.name,)
        assert (told["async_rl_reward_mean", run], told["async_rl_step", run]) == (0.25, 3)


def test_the_dashboard_asks_for_the_exported_names_of_the_first_screen() -> None:
    scalars = [name for name, spec in METRICS.items() if spec.unit != "text"]
    assert len(set(map(exported_name, scalars))) == len(scalars)
    page = json.loads(dashboard())
    asked = [target["expr"] for panel in page["panels"] for target in panel["targets"]]
    shown = [name for chart in FIRST_SCREEN.values() for name in chart.metrics]
    assert sorted(asked) == sorted(exported_name(name) + '{run=~"$run"}' for name in shown)
    assert page["templating"]["list"][1]["query"] == "label_values(async_rl_step, run)"


def test_rows_are_sent_with_their_steps(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock does not have the package; this one keeps what it is told."""
    told: list[object] = []

    def init(**arguments: object) -> SimpleNamespace:
        if arguments["project"] == "unknown":
            raise ValueError("no such project")
        told.append((arguments["id"], arguments["resume"]))
        return SimpleNamespace(
            log=lambda row, *, step: told.append((step, row)), finish=lambda: told.append("end")
        )

    wandb = SimpleNamespace(Error=ValueError, Settings=dict, init=init)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run = WandbRun("tests", tmp_path, config)
    for step in (1, 2):
        run.log(step, {"reward/mean": 0.25 * step})
    run.close()
    rows = [(1, {"reward/mean": 0.25}), (2, {"reward/mean": 0.5})]
    assert told == [(tmp_path.name, "allow"), *rows, "end"]
    with pytest.raises(InfrastructureError, match="no such project; run wandb login"):
        WandbRun("unknown", tmp_path, config)
