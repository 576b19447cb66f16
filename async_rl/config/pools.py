"""The pools of processes whose size may change: their names, work and sizes, and the configuration
that each of them reads.

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

from async_rl.config.base import as_builtins, replace, with_settings
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
_GENERATORS_PER_GATEWAY = 8
"""A call costs a gateway about 3 ms, so one core serves 300 calls per second. Eight engines make
that many calls if each writes 10,000 tokens per second in answers of 256 tokens.
"""
_ROLES: Mapping[str, Role] = {VERIFIERS: "verifier", GATEWAYS: "gateway"}


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


def pool_counts(config: RunConfig) -> dict[str, int]:
    """Return the configured number of processes of each pool that `async-rl scale` can change."""
    counts = {pool: config_of(config, pool).generators.count for pool in generator_pools(config)}
    num_generators = sum(counts.values())
    counts[VERIFIERS] = config.verifiers.count
    if config.agent.is_service:
        # One has the table of requests, and the programs score their samples themselves.
        counts |= {GATEWAYS: 1, VERIFIERS: 0}
    elif config.agent.is_used:
        # At least one: a run may start with no generator and get some by async-rl scale.
        counts[GATEWAYS] = max(1, -(-num_generators // _GENERATORS_PER_GATEWAY))
    return counts


def role_of(pool: str) -> Role:
    """Return the role of the pool's processes."""
    return _ROLES.get(pool, "generator")


def with_counts(config: RunConfig, counts: Mapping[str, int]) -> RunConfig:
    """Return the configuration with these numbers of generators and verifiers."""
    pools = {
        name: replace(pool, count=counts.get(f"{GENERATORS}.{name}", pool.count))
        for name, pool in config.generators.pools.items()
    }
    settings = {
        "generators.count": counts.get(GENERATORS, config.generators.count),
        "generators.pools": pools,
        "verifiers.count": counts.get(VERIFIERS, config.verifiers.count),
    }
    return with_settings(config, settings)


def process_name(pool: str, rank: int) -> str:
    """Return the name of the pool's process of this rank."""
    plural, *name = pool.split(".")
    return "-".join([plural.removesuffix("s"), *name, str(rank)])


def in_words_of(pool: str, config: RunConfig, problem: str) -> str:
    """Return a problem of `config_of(config, pool)` with the paths of the pool's settings."""
    # The checks name the paths of the main pool, but the person wrote generators.pools.
    for name in own_settings(config, pool):
        problem = problem.replace(
            f"{PLACES[name]}=", f"generators.pools.{pool.partition('.')[2]}.{name}="
        )
    return problem
