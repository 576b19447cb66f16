"""The configuration of a verifier without a run."""

from __future__ import annotations

from collections.abc import Sequence

from async_rl.composition.compose import compose
from async_rl.composition.files import QUICKSTART
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError


def verifier_config(settings: Sequence[str]) -> RunConfig:
    """Compose conf/ with settings of the verifier's sections. Raises ConfigError for others."""
    for setting in settings:
        if not setting.startswith(("sandbox.", "verifiers.", "reward.")):
            raise ConfigError(
                f"{setting}: without a run only sandbox.*, verifiers.* and reward.* have an effect;"
                " leave it out"
            )
    return compose(QUICKSTART, settings)
