"""Pools of generators that cannot work, or of which a setting would do nothing; refused before any
process starts.

Part of config_check.py, whose invariants hold here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from async_rl.config.base import as_builtins
from async_rl.config.generation import PoolConfig
from async_rl.config.pools import GENERATORS, PLACES, VERIFIERS, generator_pools, work_of
from async_rl.config.run import RunConfig

_TAKEN = (GENERATORS, VERIFIERS, "generator", "verifier", "learner", "buffer", "supervisor")
_OF_VLLM = tuple(name for name, place in PLACES.items() if place.startswith("generation.vllm."))
_OF_CLUSTERS = ("cpus_each", "node_kind")


def pool_problems(config: RunConfig) -> Iterator[str]:
    """All of generators.pools, and of generators.autoscale.pool."""
    pools, auto = config.generators.pools, config.generators.autoscale
    for name, pool in pools.items():
        yield from _problems_of(config, name, pool)
    evaluating = [name for name, pool in pools.items() if pool.work == "evaluation"]
    for name in [name for name, pool in pools.items() if evaluating and pool.work == "both"]:
        yield (
            f"generators.pools.{name}.work=both, but generators.pools.{evaluating[0]} is there for"
            f" evaluation alone and gets all of it; set generators.pools.{name}.work=train"
        )
    if evaluating and config.evaluation.every_steps == 0:
        yield (
            f"generators.pools.{evaluating[0]}.work=evaluation with evaluation.every_steps=0: its"
            " generators would never have work; leave the pool out, or set"
            " evaluation.every_steps=5"
        )
    if (
        pools
        and config.generators.count == 0
        and config.evaluation.every_steps
        and all(p.work == "train" for p in pools.values())
    ):
        yield (
            "generators.count=0 and every pool of generators.pools has work=train: nobody would"
            " evaluate; give one work=both, or set evaluation.every_steps=0"
        )
    able = [pool for pool in generator_pools(config) if work_of(config, pool) != "evaluation"]
    if auto.pool not in able:
        yield (
            f"generators.autoscale.pool={auto.pool}: is no pool of generators that train; choose of"
            f" {', '.join(able)}"
        )


def _problems_of(config: RunConfig, name: str, pool: PoolConfig) -> Iterator[str]:
    path = f"generators.pools.{name}"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        yield (
            f"{path}: becomes part of processes' names; use small letters, digits and underscores"
            " only, a letter first"
        )
    elif name in _TAKEN:
        yield f"{path}: {name} means something else to async-rl scale; choose another name"
    given = {key: value for key, value in as_builtins(pool).items()}
    for key in _OF_VLLM:
        if key in given and config.generation.engine != "vllm":
            yield (
                f"{path}.{key}={given[key]} does nothing with"
                f" generation.engine={config.generation.engine}; leave it out"
            )
    for key in _OF_CLUSTERS:
        if key in given and config.launcher == "local":
            yield (
                f"{path}.{key}={given[key]} does nothing with launcher=local, which has one"
                " machine; leave it out"
            )
    if pool.cores and config.launcher != "local":
        yield (
            f"{path}.cores={pool.cores} does nothing with launcher={config.launcher}, which deals"
            " out cores itself; leave it out"
        )
