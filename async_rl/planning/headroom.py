"""The memory that this machine has for processes that join a live run.

Invariants: a process that is still starting counts as one that needs all of its memory. Only
a launcher of one machine is checked; the memory of a cluster's nodes is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from async_rl.config.pools import config_of, role_of
from async_rl.config.run import RunConfig
from async_rl.planning.estimate import memory_mb
from async_rl.planning.shape import ModelShape, shape_from_hf
from async_rl.protocol.membership import PoolCount


class Headroom:
    """The memory of one machine for one run. free_mb: returns the free memory now."""

    def __init__(self, config: RunConfig, model_path: Path, free_mb: Callable[[], int]) -> None:
        self._config = config
        self._shape = _shape(model_path)
        self._free_mb = free_mb

    def problems(self, pools: list[PoolCount], wanted: Mapping[str, int]) -> list[str]:
        """Return why the wanted processes do not fit, as one line, or nothing if they fit."""
        counts = {pool.pool: wanted.get(pool.pool, pool.wanted) for pool in pools}
        grown = {pool.pool: counts[pool.pool] for pool in pools if counts[pool.pool] > pool.wanted}
        if not grown or not self._config.launcher.is_one_machine:
            return []
        free_mb = self._free_mb()
        needed_mb = 0
        parts = []
        for pool in pools:
            missing = counts[pool.pool] - pool.live
            each_mb = self._each_mb(pool.pool)
            if missing > 0:
                needed_mb += missing * each_mb
                parts.append(f"{missing} of {pool.pool} at {each_mb} MB")
        if needed_mb <= free_mb:
            return []
        request = " ".join(f"{pool}={count}" for pool, count in grown.items())
        return [
            f"{request}: needs about {needed_mb} MB more ({' and '.join(parts)}), {free_mb} MB are"
            " free on this machine; request fewer, free some memory, or add --force to try it"
        ]

    def _each_mb(self, pool: str) -> int:
        return memory_mb(config_of(self._config, pool), role_of(pool), self._shape)


def _shape(model_path: Path) -> ModelShape | None:
    try:
        text = (model_path / "config.json").read_bytes()
        return shape_from_hf(msgspec.json.decode(text, type=dict))
    except (OSError, msgspec.DecodeError, KeyError):
        # The model is elsewhere or of another kind: only libraries are counted.
        return None
