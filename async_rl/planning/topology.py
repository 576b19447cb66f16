"""From a configuration to processes: their roles, cores, GPUs and environments.

Invariants
- Cores and GPUs are assigned in order of rank. The same configuration on the same machine has the
  same specs.
- The supervisor is the parent and has no spec. Names are `buffer`, `learner-<rank>`, and the names
  in config/pools.py.
- `joining` returns the next process of a pool at any time, from the processes in use; `processes`
  only repeats it.
"""

import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence

from async_rl.config.pool_sizes import pool_counts, process_name, role_of
from async_rl.config.pools import config_of, pool_configs
from async_rl.config.run import RunConfig
from async_rl.core.frozen import frozen
from async_rl.core.machine import Machine
from async_rl.core.types import Role

_FIXED: Mapping[str, Role] = {"buffer": "buffer", "learner": "learner"}
"""The role of each pool whose size never changes."""


@frozen
class ProcessSpec:
    """One process of a run.

    cores: CPU core numbers, empty = all of the machine; gpus: their number, 0.5 = half of one;
    gpu_numbers: the GPUs that it sees.
    """

    name: str
    role: Role
    rank: int
    cores: tuple[int, ...]
    gpus: float
    env: dict[str, str]
    gpu_numbers: tuple[int, ...] = ()


def processes(
    config: RunConfig, machine: Machine, wanted: Mapping[str, int] | None = None
) -> list[ProcessSpec]:
    """Return every child of the supervisor in the order of start.

    wanted: processes per pool, instead of the configured ones.
    """
    specs: list[ProcessSpec] = []
    fixed = {"buffer": 1, "learner": config.learner.ranks}
    # Generators before verifiers: on a full cluster a verifier, which can run on any node, must not
    # take the node of a process that needs GPUs.
    for pool, count in {**fixed, **pool_counts(config), **(wanted or {})}.items():
        for _ in range(count):
            specs.append(joining(config, machine, pool, specs))
    return specs


def joining(
    config: RunConfig, machine: Machine, pool: str, in_use: Sequence[ProcessSpec]
) -> ProcessSpec:
    """Return the next process of a pool: the lowest free rank, on free GPUs.

    If too few GPUs are free, the spec has too few; `has_its_gpus` reports it.
    """
    role = _FIXED.get(pool) or role_of(pool)
    names = {spec.name for spec in in_use}
    rank = next(rank for rank in itertools.count() if process_name(pool, rank) not in names)
    divided, gpus, num_sharing = _share(config, pool, role)
    gpu_numbers = _free_gpus(machine, gpus, in_use)
    near = divided
    # A process with a share of a GPU keeps its cores, because the machine then has one GPU and
    # there is no other set of cores to be near to.
    if gpus >= 1 and gpu_numbers:
        near = machine.near(gpu_numbers[0], divided)
    used = [core for spec in in_use if spec.role == role for core in spec.cores]
    cores = _part_of_cores(divided, near, used, num_sharing)
    # One thread per core of the process: more would compete for the same cores, and gloo and ZeroMQ
    # start their own threads. Hyperthreads of a core share its arithmetic units.
    num_threads = 1
    if role in ("generator", "learner"):
        num_cpus = len(cores) or len(machine.cores) // (num_sharing if role == "learner" else 1)
        num_threads = max(1, num_cpus // machine.threads_per_core)
    env = {"OMP_NUM_THREADS": str(num_threads), "TOKENIZERS_PARALLELISM": "false"}
    if machine.num_gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpu_numbers))
        # The driver's numbers. CUDA would otherwise number unequal GPUs by their speed.
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return ProcessSpec(
        # The only buffer has no rank in its name.
        name=pool if role == "buffer" else process_name(pool, rank),
        role=role,
        rank=rank,
        cores=cores,
        gpus=gpus,
        env=env,
        gpu_numbers=tuple(gpu_numbers),
    )


def _share(config: RunConfig, pool: str, role: Role) -> tuple[Sequence[int], float, int]:
    """Return the cores that the processes of a pool divide, all of the machine if none are named;
    the GPUs of each; and how many processes divide the cores.
    """
    match role:
        case "learner":
            learner = config.learner
            return learner.cores, learner.gpus_each, learner.ranks
        case "generator":
            own = config_of(config, pool).generators
            # Pools with the same cores divide them as one pool would.
            pools = [each.generators for each in pool_configs(config).values()]
            num_sharing = sum(each.count for each in pools if each.cores == own.cores)
            return own.cores, own.gpus_each, num_sharing
        case "verifier":
            return config.verifiers.cores, 0, 1
    return (), 0, 1


def has_its_gpus(spec: ProcessSpec) -> bool:
    """Return whether the machine had as many free GPUs as the process needs."""
    return len(spec.gpu_numbers) == _num_gpus(spec.gpus)


def _num_gpus(gpus: float) -> int:
    """The number of devices that a process sees: a share of a GPU needs one."""
    return max(1, round(gpus)) if gpus > 0 else 0


def _part_of_cores(
    pool: Sequence[int],
    near: Sequence[int],
    used: Iterable[int],
    num_sharing: int,
) -> tuple[int, ...]:
    """One of the parts of the cores `near`, of a pool that `num_sharing` processes have: the part
    that has the fewest of the used cores.
    """
    if not pool:
        return ()
    # With fewer cores than processes, processes share cores.
    count = min(len(near), max(1, -(-num_sharing * len(near) // len(pool))))
    bounds = [position * len(near) // count for position in range(count + 1)]
    parts = [tuple(near[start:end]) for start, end in itertools.pairwise(bounds)]
    users = collections.Counter(used)
    return min(parts, key=lambda part: sum(users[core] for core in part))


def _free_gpus(machine: Machine, gpus: float, in_use: Sequence[ProcessSpec]) -> list[int]:
    """The first GPUs with room for the process; fewer than it needs if the machine has no more."""
    free = [1.0] * machine.num_gpus
    for spec in in_use:
        for index in spec.gpu_numbers:
            free[index] -= min(spec.gpus, 1.0)
    # Shares such as 0.3 do not add up to exactly 1.
    needed = min(gpus, 1.0) - 1e-6
    fitting = [index for index, share in enumerate(free) if share >= needed]
    return fitting[: _num_gpus(gpus)]
