"""From a configuration to processes: who runs, on which cores and GPUs, with which environment.
Pure.

Invariants
- Cores and GPUs are dealt out in order of rank; the same configuration on the same machine gives
  the same specs.
- The supervisor is the parent and has no spec.  Names are `buffer`, `learner-<rank>`, and those of
  pools.py.
- `joining` gives the next process of a pool at any time, from what is in use; `processes` is
  nothing but that, repeated.
Used by the supervisor to start processes, and by `--dry-run` to show them.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from async_rl.config.pools import VERIFIERS, config_of, pool_counts, process_name
from async_rl.config.run import RunConfig
from async_rl.core.machine import Machine
from async_rl.core.types import Role

_START_ORDER = ("buffer", "learner", "generator", "verifier")
"""On a full cluster a verifier, which can be anywhere, shall not take the place of those that
cannot.
"""


SCALE_FILE = "scale.json"
"""In the run's directory: how many processes of each pool were asked for last, if that was not the
configuration.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process of a run. cores: CPU core numbers, empty = all of the machine's; gpus: how many,
    0.5 = half of one.
    """

    name: str
    role: Role
    rank: int
    cores: tuple[int, ...]
    gpus: float
    env: dict[str, str]


def processes(
    config: RunConfig, machine: Machine, wanted: Mapping[str, int] | None = None
) -> list[ProcessSpec]:
    """Every child of the supervisor, in order of start: those first that a cluster has the fewest
    places for.

    wanted: processes per pool, instead of those in the configuration.
    """
    devices = _Devices(machine.num_gpus)
    specs = [_spec(0, machine, devices, "buffer", 0, (), name="buffer")]
    specs += [
        _spec(config.learner.gpus_each, machine, devices, "learner", r, learner_cores(config, r))
        for r in range(config.learner.ranks)
    ]
    for pool, count in (wanted or pool_counts(config)).items():
        for _ in range(count):
            specs.append(joining(config, machine, pool, specs))
    return sorted(specs, key=lambda spec: _START_ORDER.index(spec.role))


def joining(
    config: RunConfig, machine: Machine, pool: str, in_use: Sequence[ProcessSpec]
) -> ProcessSpec:
    """The next process of a pool beside those in use: the lowest free rank, on GPUs that nobody has
    (`has_its_gpus` tells).
    """
    names = {spec.name for spec in in_use}
    rank = next(rank for rank in itertools.count() if process_name(pool, rank) not in names)
    name = process_name(pool, rank)
    devices = _Devices(machine.num_gpus)
    for spec in in_use:
        devices.give(spec)
    if pool == VERIFIERS:
        return _spec(
            0, machine, devices, "verifier", rank, tuple(config.verifiers.cores), name=name
        )
    config = config_of(config, pool)
    return _spec(
        config.generators.gpus_each,
        machine,
        devices,
        "generator",
        rank,
        _generator_cores(config, machine, in_use),
        name=name,
    )


def has_its_gpus(spec: ProcessSpec) -> bool:
    """Whether the machine had as many free GPUs as the process takes."""
    return len(_visible(spec)) == (max(1, round(spec.gpus)) if spec.gpus > 0 else 0)


def _visible(spec: ProcessSpec) -> list[int]:
    return [int(index) for index in spec.env.get("CUDA_VISIBLE_DEVICES", "").split(",") if index]


def _generator_cores(
    config: RunConfig, machine: Machine, in_use: Sequence[ProcessSpec]
) -> tuple[int, ...]:
    """Cores of one more generator: all of the pool's, or the `cores_each` in a row that the
    generators in use, of any pool, share least.
    """
    pool, each = config.generators.cores, config.generators.cores_each
    if each == 0:
        return tuple(pool)
    pool = pool or list(machine.cores)
    shared = collections.Counter(
        core for spec in in_use if spec.role == "generator" for core in spec.cores
    )
    rows = (
        tuple(dict.fromkeys(pool[(k * each + i) % len(pool)] for i in range(each)))
        for k in range(len(pool))
    )
    return min(rows, key=lambda row: sum(shared[core] for core in row))


def learner_cores(config: RunConfig, rank: int) -> tuple[int, ...]:
    """Cores of one learner rank: every `ranks`-th of the pool's, shared where there are fewer cores
    than ranks.
    """
    pool, ranks = config.learner.cores, config.learner.ranks
    if not pool:
        return ()
    return tuple(pool[rank::ranks]) or (pool[rank % len(pool)],)


class _Devices:
    """Deals out GPUs: whole ones in order, shares of one until it is full."""

    def __init__(self, num_gpus: int) -> None:
        self._free = [1.0] * num_gpus

    def give(self, spec: ProcessSpec) -> None:
        """The process has what it was given before."""
        for index in _visible(spec):
            self._free[index] -= min(spec.gpus, 1.0)

    def take(self, gpus: float) -> list[int]:
        if gpus <= 0:
            return []
        share = min(gpus, 1.0)
        fitting = [index for index, free in enumerate(self._free) if free >= share - 1e-6][
            : max(1, round(gpus))
        ]
        for index in fitting:
            self._free[index] -= share
        return fitting


def _spec(
    gpus: float,
    machine: Machine,
    devices: _Devices,
    role: Role,
    rank: int,
    cores: Sequence[int],
    *,
    name: str | None = None,
) -> ProcessSpec:
    is_heavy = role in ("generator", "learner")
    env = {
        # One thread per core it owns: more would fight for the same cores, and gloo and ZeroMQ
        # bring threads of their own.
        "OMP_NUM_THREADS": str((len(cores) or len(machine.cores)) if is_heavy else 1),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if machine.num_gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices.take(gpus)))
    return ProcessSpec(
        name=name or f"{role}-{rank}", role=role, rank=rank, cores=tuple(cores), gpus=gpus, env=env
    )
