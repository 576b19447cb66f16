"""Whether this machine has memory for processes that are to join a live run.

Invariants: a process that does not serve yet counts as one that still needs all of its memory; a
cluster is not asked. Used by the scaler, for people and for the autoscaler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from async_rl.config.pools import VERIFIERS, config_of
from async_rl.config.run import RunConfig
from async_rl.core.types import PoolCount
from async_rl.planning.estimate import ModelShape, memory_mb, shape_from_hf


class Headroom:
    """The memory of one machine beside one run. free_mb: how much is free now."""

    def __init__(self, config: RunConfig, model_path: Path, free_mb: Callable[[], int]) -> None:
        self._config = config
        self._shape = _shape(model_path)
        self._free_mb = free_mb

    def problems(self, pools: list[PoolCount], wanted: Mapping[str, int]) -> list[str]:
        """Why there cannot be as many as wanted, one line in all; empty if there is room, or if
        none would be added.
        """
        live = {pool.pool: pool.live for pool in pools}
        grown = {
            pool.pool: wanted[pool.pool] for pool in pools if wanted.get(pool.pool, 0) > pool.wanted
        }
        if not grown or self._config.launcher != "local":
            return []
        to_come = {
            pool.pool: max(0, wanted.get(pool.pool, pool.wanted) - live[pool.pool])
            for pool in pools
        }
        needed_mb = sum(count * self._each_mb(pool) for pool, count in to_come.items())
        free_mb = self._free_mb()
        if needed_mb <= free_mb:
            return []
        which = " ".join(f"{pool}={count}" for pool, count in grown.items())
        each = " and ".join(
            f"{count} of {pool} at {self._each_mb(pool)} MB"
            for pool, count in to_come.items()
            if count
        )
        return [
            f"{which}: needs about {needed_mb} MB more ({each}), {free_mb} MB are free on this"
            " machine; ask for fewer, free some, or add --force to try it"
        ]

    def _each_mb(self, pool: str) -> int:
        return memory_mb(
            config_of(self._config, pool),
            "verifier" if pool == VERIFIERS else "generator",
            self._shape,
        )


def _shape(model_path: Path) -> ModelShape | None:
    try:
        return shape_from_hf(
            msgspec.json.decode((model_path / "config.json").read_bytes(), type=dict)
        )
    except (OSError, msgspec.DecodeError, KeyError):
        return None
