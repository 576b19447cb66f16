"""The plan of a launch: the table of processes and the derived numbers.

Display only; topology.py and estimate.py compute the values.
"""

from collections.abc import Sequence

from rich.console import Console

from async_rl.composition.hardware import described, model_shape
from async_rl.config.pools import config_of, pool_of
from async_rl.config.run import RunConfig
from async_rl.core.machine import Machine
from async_rl.core.text import ranges
from async_rl.core.types import Role
from async_rl.launchers.backends.cluster import cluster_cpus
from async_rl.monitoring.terminal import open_table
from async_rl.planning.estimate import gpu_memory_mb, memory_mb
from async_rl.planning.fit import derived_numbers, reasons
from async_rl.planning.presets import fleet
from async_rl.planning.topology import ProcessSpec

_UNKNOWN_NODES = "not known here, so nothing is fitted to it; describe a node with --machine"


def show_plan(
    console: Console,
    config: RunConfig,
    specs: Sequence[ProcessSpec],
    machine: Machine,
    *,
    preset: str = "",
) -> None:
    """Print the process table and the derived numbers. preset: the file of conf/hardware that was
    chosen; empty if it no longer matters.
    """
    shape = model_shape(config)
    everywhere = f"cores {_numbers(machine.cores)}"
    rows: list[tuple[str, Role, str]] = [("supervisor", "supervisor", everywhere)]
    rows += [(spec.name, spec.role, _placement(config, spec, everywhere)) for spec in specs]
    table = open_table("process", "runs on", "memory")
    for name, role, placement in rows:
        # A pool may have engines of another size.
        own = config_of(config, pool_of(name))
        size = f"{memory_mb(own, role, shape)} MB"
        on_gpu = 0 if shape is None else gpu_memory_mb(own, role, shape)
        table.add_row(name, placement, f"{size}, GPU {on_gpu} MB" if on_gpu else size)
    console.print("processes", table, "", sep="\n")
    whole = fleet(config, machine)
    derived = derived_numbers(config, shape)
    if whole is not None:
        derived += reasons(config, shape, whole)
    elif config.learner.gpus_each > 0:
        derived.append(("memory of the nodes", _UNKNOWN_NODES))
    if preset:
        derived.insert(0, ("hardware", f"{preset} ({described(machine)})"))
    numbers = open_table("derived numbers", "")
    for row in derived:
        numbers.add_row(*row)
    console.print(numbers, "", sep="\n")


def _placement(config: RunConfig, spec: ProcessSpec, everywhere: str) -> str:
    # The cluster chooses the node and the cores when the process starts.
    if not config.launcher.is_one_machine:
        gpus = f", {spec.gpus:g} GPU" if spec.gpus else ""
        return f"{cluster_cpus(config, spec)} CPU{gpus} of a node"
    cores = f"cores {_numbers(spec.cores)}" if spec.cores else everywhere
    if not spec.gpus:
        return cores
    return f"GPU {spec.env.get('CUDA_VISIBLE_DEVICES', '?')} ({spec.gpus:g}), {cores}"


def _numbers(cores: Sequence[int]) -> str:
    return ranges(cores, to="-", between=",")
