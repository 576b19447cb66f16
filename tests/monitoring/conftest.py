from collections.abc import Callable
from pathlib import Path

import pytest
from composing import compose

from async_rl.config.base import replace
from async_rl.config.run import RunConfig
from async_rl.monitoring.console import Console
from async_rl.observability.logs import configure_logging
from async_rl.supervision.liveness import Liveness
from async_rl.supervision.monitor import Monitor
from async_rl.supervision.registry import Registry


@pytest.fixture(scope="session")
def embedded_config() -> RunConfig:
    return compose("ppo_code", ["run_name=watched", "num_steps=4"])


@pytest.fixture
def config(embedded_config: RunConfig) -> RunConfig:
    """Four steps, evaluated at 0, 2 and 4."""
    return replace(embedded_config, evaluation=replace(embedded_config.evaluation, every_steps=2))


@pytest.fixture
def monitor_of(config: RunConfig, tmp_path: Path) -> Callable[..., Monitor]:
    """Make the supervisor's monitor, without TensorBoard, with these settings of monitoring."""

    def make(**settings: object) -> Monitor:
        monitoring = replace(config.monitoring, tensorboard_port=None, **settings)
        own = replace(config, monitoring=monitoring)
        registry = Registry()
        configure_logging(tmp_path, "supervisor")
        return Monitor(
            own,
            tmp_path,
            step=0,
            registry=registry,
            liveness=Liveness(registry, own.timeouts, is_local=True),
            console=Console(own, tmp_path),
        )

    return make
