"""The preset of conf/hardware for a machine, the functions by which a preset divides cores and
GPUs, and the settings that fit a model to the machine.
"""

import functools
import itertools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import msgspec

from async_rl.config.base import by_name
from async_rl.config.run import COLOCATED, RunConfig
from async_rl.core.errors import ConfigError
from async_rl.core.machine import UNKNOWN_DISK, Machine
from async_rl.data.model_files import embedded_model
from async_rl.planning.presets import fitted, fleet
from async_rl.planning.shape import ModelShape, read_shape

CLUSTER = "cluster"
_FITTED_PRESETS = ("cpu", "gpu", "gpus", CLUSTER)

_FORM = "cores=64,gpus=8,gpu_gb=80,memory_gb=512,disk_gb=2000"
_Count = Annotated[int, msgspec.Meta(ge=0)]


def preset_for(machine: Machine, *, is_cluster: bool) -> str:
    """Return the file of conf/hardware: CLUSTER, or for one machine a file by number of GPUs."""
    if is_cluster:
        return CLUSTER
    return {0: "cpu", 1: "gpu"}.get(machine.num_gpus, "gpus")


def described(machine: Machine) -> str:
    """Return a description of the machine."""
    gpus = f"{machine.num_gpus or 'no'} GPU{'' if machine.num_gpus == 1 else 's'}"
    if machine.gpu_mb:
        gpus += f" of {machine.gpu_mb >> 10} GB"
    if machine.unusable_gpus:
        gpus += f" ({machine.unusable_gpus} unused: torch or vLLM is a CPU build)"
    return f"{len(machine.cores)} cores, {gpus}, {machine.memory_mb >> 10} GB"


class _Description(msgspec.Struct, forbid_unknown_fields=True):
    """The machine that `--machine` describes; 0 GB of a GPU: its memory is not judged."""

    cores: Annotated[int, msgspec.Meta(ge=1)]
    gpus: _Count
    memory_gb: _Count
    gpu_gb: _Count = 0
    disk_gb: _Count = UNKNOWN_DISK >> 10


def pretended_machine(text: str) -> Machine:
    """Parse text such as _FORM. Raises ConfigError for anything else.

    Without gpu_gb the memory of its GPUs is not judged, without disk_gb its disk.
    """
    try:
        given = msgspec.convert(by_name(text.split(",")), _Description, strict=False)
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"--machine {text}: write it as {_FORM}; gpu_gb and disk_gb may be omitted"
        ) from error
    return Machine(
        cores=tuple(range(given.cores)),
        num_gpus=given.gpus,
        memory_mb=given.memory_gb << 10,
        gpu_mb=given.gpu_gb << 10,
        disk_mb=given.disk_gb << 10,
    )


def resolvers(machine: Machine, preset: str) -> dict[str, Callable[..., Any]]:
    """Return the functions that conf/hardware/*.yaml call, by name, for this machine, whose preset
    is `preset`.
    """
    return {
        "this_hardware": lambda: preset,
        "gpus": lambda: machine.num_gpus,
        "share_of_cores": functools.partial(share_of_cores, machine),
        "learning": learning,
        "generating": generating,
        "in_turns": lambda in_turns, at_once, placement: (
            in_turns if placement == COLOCATED else at_once
        ),
        "if": lambda condition, value, otherwise: value if condition else otherwise,
    }


def share_of_cores(machine: Machine, part: int, parts: int) -> list[int]:
    """The part-th of `parts` equal shares of the cores of each memory node with GPUs, so that every
    process can have cores near its GPU; all cores of a node where there are fewer than `parts`.
    """
    # Without a GPU no core is nearer than another, and all cores are one node.
    node_of_cores = machine.core_nodes if machine.num_gpus else ()
    nodes: dict[int, list[int]] = {}
    for core, node in itertools.zip_longest(machine.cores, node_of_cores, fillvalue=0):
        nodes.setdefault(node, []).append(core)
    given = []
    for _, cores in sorted(nodes.items()):
        share = cores[part * len(cores) // parts : (part + 1) * len(cores) // parts]
        # An empty share would mean all cores (`cores: []`) by accident.
        given += share if len(cores) >= parts else cores
    return given


def learning(nodes: int, gpus_per_node: int) -> int:
    """Learner ranks: a quarter of all GPUs, no more than one node has, so that they need no
    network; one without GPUs.
    """
    return max(1, min(nodes * gpus_per_node // 4, gpus_per_node))


def generating(nodes: int, gpus_per_node: int) -> int:
    """Generators: the GPUs that do not learn; without GPUs, one on each node but the first."""
    return max(
        1, nodes * gpus_per_node - learning(nodes, gpus_per_node) if gpus_per_node else nodes - 1
    )


def model_shape(config: RunConfig) -> ModelShape | None:
    """Return the shape of the policy; None if it is unknown before the model is loaded."""
    path = config.model.path
    return read_shape(embedded_model(config) if path is None else Path(path))


def fit_to_machine(
    config: RunConfig, machine: Machine, preset: str, given: Collection[str]
) -> RunConfig:
    """Return the configuration with the settings that its model needs on this machine, or on the
    nodes of a cluster if this is one of them.

    given: paths of settings that the user chose; they stay.
    """
    shape = model_shape(config)
    whole = fleet(config, machine)
    if preset not in _FITTED_PRESETS or shape is None or whole is None:
        return config
    return fitted(config, shape, whole, given)
