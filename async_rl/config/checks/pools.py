"""Checks of the pools of generators: pools that cannot work, and settings without effect.

Part of `checks/run.py`, whose invariants hold here.
"""

import re
from collections.abc import Iterator

from async_rl.config.base import as_builtins
from async_rl.config.generation import PoolConfig
from async_rl.config.pools import PLACES
from async_rl.config.run import RunConfig


def pool_problems(config: RunConfig) -> Iterator[str]:
    """Yield the problems of generators.pools."""
    pools = config.generators.pools
    for name, pool in pools.items():
        yield from _problems_of(config, name, pool)
        if config.takes_turns:
            yield (
                f"generators.pools.{name} with placement=colocated: the learner shares its device"
                " with the generators of one pool only; remove this pool"
            )
    evaluating = [name for name, pool in pools.items() if pool.work == "evaluation"]
    # An evaluation belongs to one kind of pool. With both, its results would depend on which
    # generators are free.
    for name in [name for name, pool in pools.items() if evaluating and pool.work == "both"]:
        yield (
            f"generators.pools.{name}.work=both, but generators.pools.{evaluating[0]} only"
            f" evaluates and gets every evaluation; set generators.pools.{name}.work=train"
        )
    if evaluating and config.evaluation.every_steps == 0:
        yield (
            f"generators.pools.{evaluating[0]}.work=evaluation with evaluation.every_steps=0: its"
            " generators would never have work; remove the pool, or set evaluation.every_steps=5"
        )
    if (
        pools
        and config.generators.count == 0
        and config.evaluation.every_steps
        and all(p.work == "train" for p in pools.values())
    ):
        yield (
            "generators.count=0 and every pool of generators.pools has work=train: no generator"
            " would evaluate; set work=both for one pool, or evaluation.every_steps=0"
        )


def _problems_of(config: RunConfig, name: str, pool: PoolConfig) -> Iterator[str]:
    path = f"generators.pools.{name}"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        yield (
            f"{path}: becomes part of process names; use lowercase letters, digits and underscores,"
            " with a letter first"
        )
    launcher = config.launcher
    for key, value in as_builtins(pool).items():
        place = PLACES.get(key, "")
        if place.startswith("generation.vllm.") and not config.generation.is_vllm:
            cause = f"generation.engine={config.generation.engine}"
        elif place.startswith("launcher.") and launcher.is_one_machine:
            cause = f"launcher={launcher.kind}, which uses one machine"
        elif key == "cores" and value and not launcher.is_one_machine:
            cause = f"launcher={launcher.kind}, which assigns the cores"
        else:
            continue
        yield f"{path}.{key}={value} has no effect with {cause}; remove it"
