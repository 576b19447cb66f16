"""The machine that a run starts on: cores, GPUs, memory. Read once at launch; the planning itself stays pure.

Used by `config_check.py` and `topology.py` as a value, filled in by `this_machine()` at launch.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What processes can be placed on. cores: numbers of the CPU cores this process may use; memory_mb: RAM, or the container's limit."""

    cores: tuple[int, ...]
    num_gpus: int
    memory_mb: int


def this_machine() -> Machine:
    """The machine at hand, as far as this process may use it."""
    return Machine(cores=tuple(sorted(os.sched_getaffinity(0))), num_gpus=_count_gpus(), memory_mb=_memory_mb())


def _count_gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    return sum(1 for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))


def _memory_mb() -> int:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [physical]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        path = Path(name)
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limits) // 2**20
