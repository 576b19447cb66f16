from __future__ import annotations

import pytest
from composing import compose

from async_rl.config.base import replace
from async_rl.config.run import RunConfig


@pytest.fixture(scope="session")
def embedded_config() -> RunConfig:
    return compose("ppo_code", ["run_name=watched", "num_steps=4"])


@pytest.fixture
def config(embedded_config: RunConfig) -> RunConfig:
    """Four steps, evaluated at 0, 2 and 4."""
    return replace(
        embedded_config,
        evaluation=replace(embedded_config.evaluation, every_steps=2),
    )
