"""The layout of the CPUs: memory nodes and hyperthreads of one core, as Linux lists them.

A machine lists the second hyperthreads of all cores after the first ones, and its sockets one after
the other. In the order of `arranged` a contiguous part of the list has whole cores of one node.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from async_rl.core.frozen import frozen

_SYSTEM = Path("/sys/devices/system")


@frozen
class Cpus:
    """CPUs by number.

    numbers: siblings (hyperthreads of one core) adjacent, nodes one after the other.  nodes: the
    memory node of each.  threads_per_core: hyperthreads of a core.
    """

    numbers: tuple[int, ...]
    nodes: tuple[int, ...]
    threads_per_core: int


def arranged(numbers: Iterable[int], system: Path = _SYSTEM) -> Cpus:
    """Arrange these CPUs. A kernel that lists neither nodes nor siblings has one of each."""
    nodes = {cpu: node for node in _nodes(system) for cpu in _cpus_of(node)}
    siblings = {cpu: _siblings(cpu, system) for cpu in numbers}
    # By siblings before the own number: the hyperthreads of a core are then adjacent, though Linux
    # numbers them half the list apart.
    order = sorted(siblings, key=lambda cpu: (_number(nodes.get(cpu)), siblings[cpu], cpu))
    return Cpus(
        numbers=tuple(order),
        nodes=tuple(_number(nodes.get(cpu)) for cpu in order),
        # The largest, since some processors mix cores with and without a second thread.
        threads_per_core=max((len(each) for each in siblings.values()), default=1),
    )


def _nodes(system: Path) -> list[Path]:
    return list((system / "node").glob("node[0-9]*"))


def _number(node: Path | None) -> int:
    return 0 if node is None else int(node.name.removeprefix("node"))


def _cpus_of(node: Path) -> list[int]:
    return _listed(node / "cpulist")


def _siblings(cpu: int, system: Path) -> tuple[int, ...]:
    path = system / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list"
    # Containers may hide this file; a core without it counts as one thread.
    return tuple(_listed(path)) or (cpu,)


def _listed(path: Path) -> list[int]:
    """The numbers of a list such as 0-3,8."""
    text = path.read_text() if path.is_file() else ""
    found: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found += range(int(first), int(last or first) + 1)
    return found
