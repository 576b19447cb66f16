"""The model of a configuration, and the settings that fit it to a machine."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec

from async_rl.config.run import RunConfig
from async_rl.core.machine import Machine
from async_rl.data.embedded import TINY_CODER
from async_rl.planning.presets import fitted
from async_rl.planning.shape import ModelShape, embedded_shape, shape_from_hf

FITTED_PRESETS = ("cpu", "gpu", "gpus")
"""The presets of one machine. The memory of a cluster's nodes is not known here."""


def model_shape(config: RunConfig) -> ModelShape | None:
    """Return the shape of the policy; None if it is unknown before the model is loaded."""
    if config.model.path is None:
        return embedded_shape(
            hidden_size=TINY_CODER.hidden_size,
            num_layers=TINY_CODER.num_layers,
            num_heads=TINY_CODER.num_heads,
        )
    try:
        text = (Path(config.model.path) / "config.json").read_bytes()
        return shape_from_hf(msgspec.json.decode(text, type=dict))
    except (OSError, msgspec.DecodeError, KeyError):
        return None


def fit_to_machine(
    config: RunConfig, machine: Machine, preset: str, given: Collection[str]
) -> RunConfig:
    """Return the configuration with the settings that its model needs on this machine.

    given: paths of settings that the user chose; they stay.
    """
    shape = model_shape(config)
    if preset not in FITTED_PRESETS or shape is None:
        return config
    return fitted(config, shape, machine, given)
