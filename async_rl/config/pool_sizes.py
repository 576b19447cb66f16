"""How many processes each pool has, and their names: for the code that plans, starts and scales
runs. A process of a run needs `pools.py` only.

Pure. Docs: docs/decisions/pools.md.
"""

from collections.abc import Mapping

from async_rl.config.base import replace, with_settings
from async_rl.config.pools import (
    GATEWAYS,
    GENERATORS,
    PLACES,
    VERIFIERS,
    config_of,
    generator_pools,
    own_settings,
)
from async_rl.config.run import RunConfig
from async_rl.core.types import Role

_GENERATORS_PER_GATEWAY = 8
"""A call costs a gateway about 3 ms, so one core serves 300 calls per second. Eight engines make
that many calls if each writes 10,000 tokens per second in answers of 256 tokens.
"""
_ROLES: Mapping[str, Role] = {VERIFIERS: "verifier", GATEWAYS: "gateway"}


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
