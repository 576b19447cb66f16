"""Configurations for the tests of data."""

from __future__ import annotations

from composing import compose_unchecked

from async_rl.config.run import RunConfig
from async_rl.data.embedded import TinyCoder

SMALL_MODEL = TinyCoder(
    hidden_size=32, num_layers=1, num_heads=1, warm_start_steps=2, warm_start_batch=4
)
"""An embedded model that takes a second to make."""


def make_config(*overrides: str) -> RunConfig:
    return compose_unchecked("grpo_code", overrides)
