"""Configurations for the tests of data."""

from __future__ import annotations

from async_rl.config.run import RunConfig
from async_rl.launchers.configuration.compose import compose_unchecked

SMALL_MODEL = (
    "model.tiny_coder.hidden_size=32",
    "model.tiny_coder.num_layers=1",
    "model.tiny_coder.num_heads=1",
    "model.tiny_coder.warm_start_steps=2",
    "model.tiny_coder.warm_start_batch=4",
)


def make_config(*overrides: str) -> RunConfig:
    return compose_unchecked("grpo_code", overrides)
