"""The resolved configuration of a run, read from its directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from async_rl.composition.choices import expand
from async_rl.composition.problems import problems_of
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError


def config_of(run_dir: Path) -> RunConfig:
    """Read the run's resolved configuration. Raises ConfigError if it cannot be read."""
    try:
        tree = msgspec.yaml.decode((run_dir / "config.yaml").read_bytes(), type=dict[str, Any])
        expand(tree)
        problems = problems_of(tree)
        if problems:
            first = next(iter(problems.values()))
            raise ConfigError(
                f"{run_dir}/config.yaml is damaged or of another version of async_rl ({first});"
                " restore it from a copy, or read this run with the version that made it"
            )
        return RunConfig.model_validate(tree)
    except (OSError, msgspec.DecodeError) as error:
        reason = " ".join(str(error).split())  # a YAML error has several lines
        raise ConfigError(
            f"{run_dir}/config.yaml cannot be read: {reason}; restore it from a copy"
        ) from error
