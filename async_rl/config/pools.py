"""The pools of processes whose size may change: their names, their work, and the configuration that
each of them reads.

Invariants
- A pool is `verifiers`, `gateways` (only with agents), `generators` (generators.count of them) or
  `generators.<name>` (an entry of generators.pools); its processes are `verifier-<rank>`,
  `gateway-<rank>`, `generator-<rank>` and `generator-<name>-<rank>`.
- A generator reads its settings at the same paths as every other process: `config_of` writes those
  of its pool there.
- If a pool only evaluates, no other pool evaluates, and that pool never gets a training prompt.
Pure. Docs: docs/decisions/pools.md.
"""

from collections.abc import Mapping
from typing import Any, Literal

from async_rl.config.base import as_builtins, with_settings
from async_rl.config.generation import PoolConfig
from async_rl.config.run import RunConfig
from async_rl.core.types import Purpose, Role

GENERATORS = "generators"
VERIFIERS = "verifiers"
GATEWAYS = "gateways"
SCALE_FILE = "scale.json"
"""File in the run's directory: the last requested number of processes of each pool, if it is not
the configured number.
"""
SEATS_PER_POOL = 10_000
"""Upper bound of the number of processes of a pool."""
PLACES = {
    "count": "generators.count",
    "cores": "generators.cores",
    "gpus_each": "generators.gpus_each",
    "max_concurrent_groups": "generation.max_concurrent_groups",
    "tensor_parallel_size": "generation.vllm.tensor_parallel_size",
    "max_num_seqs": "generation.vllm.max_num_seqs",
    "max_num_batched_tokens": "generation.vllm.max_num_batched_tokens",
    "kv_cache_mb": "generation.vllm.kv_cache_mb",
    "gpu_memory_utilization": "generation.vllm.gpu_memory_utilization",
    "cpus_each": "launcher.generator_cpus",
    "node_kind": "launcher.node_kind",
}
"""Settings of a pool, and the setting of the run that each of them replaces."""
Work = Literal["train", "evaluation", "both"]
_PURPOSES: Mapping[Work, frozenset[Purpose]] = {
    "train": frozenset({Purpose.TRAIN}),
    "evaluation": frozenset({Purpose.EVAL}),
    "both": frozenset(Purpose),
}


def group_role(config: RunConfig) -> Role:
    """Return the role of the processes that make groups."""
    return "gateway" if config.agent.is_used else "generator"


def generator_pools(config: RunConfig) -> list[str]:
    """Return the pools of generators, the main pool first."""
    return [GENERATORS, *(f"{GENERATORS}.{name}" for name in config.generators.pools)]


def pool_of(process: str) -> str:
    """Return the pool of the process of this name; empty for buffer and learner, whose number is
    fixed.
    """
    # A process without a rank in its name is in no pool.
    role, *name = process.split("-")[:-1] or [process]
    if f"{role}s" in (GENERATORS, VERIFIERS, GATEWAYS):
        return ".".join([f"{role}s", *name])
    return ""


def settings_of(config: RunConfig, pool: str) -> PoolConfig | None:
    """Return the entry of generators.pools for this pool; None for the main pool."""
    return config.generators.pools.get(pool.partition(".")[2])


def config_of(config: RunConfig, pool: str) -> RunConfig:
    """Return the configuration that a process of the pool reads.

    A tensor parallel generator has one GPU per part if generators use GPUs.
    """
    changes = {PLACES[name]: value for name, value in own_settings(config, pool).items()}
    return with_settings(config, changes) if changes else config


def pool_configs(config: RunConfig) -> dict[str, RunConfig]:
    """Return the configuration that each pool of generators reads, the main pool first."""
    return {pool: config_of(config, pool) for pool in generator_pools(config)}


def own_settings(config: RunConfig, pool: str) -> dict[str, Any]:
    """Return the settings that this pool overrides, by their names in generators.pools."""
    settings = settings_of(config, pool)
    if settings is None:
        return {}
    # On this machine a pool has no settings of a cluster; checks/pools.py refuses them by name.
    given = {
        name: value
        for name, value in as_builtins(settings).items()
        if name in PLACES
        and (not config.launcher.is_one_machine or not PLACES[name].startswith("launcher."))
    }
    if settings.tensor_parallel_size is not None:
        num_parts = settings.tensor_parallel_size * config.generation.vllm.num_stages
        given.setdefault("gpus_each", float(num_parts * (config.generators.gpus_each > 0)))
    return given


def work_of(config: RunConfig, pool: str) -> Work:
    """Return the work of the pool's generators. The main pool does both, or only trains if another
    pool has work=evaluation.
    """
    settings = settings_of(config, pool)
    if settings is not None:
        return settings.work
    # One pool evaluates or all do, so that the pool of an evaluation never depends on which
    # generators are free.
    others = [pool.work for pool in config.generators.pools.values()]
    return "train" if "evaluation" in others else "both"


def purposes_of(config: RunConfig, pool: str) -> frozenset[Purpose]:
    """Return the purposes of the tickets that the pool's generators may receive."""
    return _PURPOSES[work_of(config, pool)]


def evaluates_only(config: RunConfig, process: str) -> bool:
    """Return whether the process of this name is a generator that never gets a training prompt."""
    return work_of(config, pool_of(process)) == "evaluation"


def seat(config: RunConfig, process: str) -> int:
    """Return a number that is unique among the run's generators: the rank plus an offset per
    pool.
    """
    number = generator_pools(config).index(pool_of(process))
    return int(process.rpartition("-")[2]) + SEATS_PER_POOL * number
