"""`async-rl doctor`: measures this machine and reports missing parts of a run, with remedies.

The verdicts are in findings.py. Invariants: no file or process is left behind; exit code 1 if no
run can work here, 0 if at worst something is slower or weaker than it could be.
"""

from __future__ import annotations

import asyncio
import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata

import typer

from async_rl.core.gpus import read_gpus
from async_rl.core.machine import Machine, chosen_gpus, this_machine
from async_rl.launchers.commands import findings
from async_rl.launchers.commands.findings import ENGINES, PACKAGES, Finding
from async_rl.launchers.commands.reports import print_table


def doctor() -> None:
    """Check this machine: versions, GPUs, shared memory, jail. Exit code 1 if no run can work here.

    Examples: async-rl doctor
    """
    found = list(examine(this_machine()))
    print_table(("", "subject", "result", "remedy"), ((f.state, *f[:1], *f[2:]) for f in found))
    # A weak finding makes runs slower or less protected, not impossible.
    raise typer.Exit(any(finding.state == "bad" for finding in found))


def examine(machine: Machine) -> Iterator[Finding]:
    """Yield all findings, the cheap ones first."""
    yield findings.of_python(sys.version_info[:2], platform.system(), platform.machine())
    yield findings.of_packages({name: _version(name) for name in (*PACKAGES, *ENGINES)})
    gpus = read_gpus()
    yield findings.of_gpus(machine, gpus, chosen_gpus(os.environ), _nccl())
    yield _shared_memory(len(gpus.devices))
    yield asyncio.run(_jail())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _nccl() -> str | None:
    """Return the version of NCCL, whose package name contains the version of CUDA."""
    for distribution in metadata.distributions():
        # nvidia-nccl-cu12, -cu13 and so on.
        if str(distribution.metadata["Name"]).startswith("nvidia-nccl"):
            return distribution.version
    return None


def _shared_memory(num_gpus: int) -> Finding:
    """Check memfd, which carries weights, and /dev/shm, which torch uses between processes."""
    try:
        fd = os.memfd_create("async-rl-doctor")
        try:
            os.pwrite(fd, bytes(2**20), 0)
        finally:
            os.close(fd)
        space = os.statvfs("/dev/shm")
    except OSError as error:
        remedy = "allow memfd_create and mount /dev/shm (docker run --shm-size=1g)"
        return Finding("shared memory", "bad", str(error), remedy)
    free_mb = space.f_bavail * space.f_frsize // 2**20
    return findings.of_shared_memory(free_mb, num_gpus=num_gpus)


async def _jail() -> Finding:
    from async_rl.sandbox.cell import CellFailed
    from async_rl.sandbox.cells import Cells, Unsafe

    try:
        async with await Cells.start(1) as cells:
            return findings.of_jail(cells.level, cells.reasons)
    except (Unsafe, CellFailed) as error:
        return findings.of_jail(0, [str(error)])
