"""`async-rl doctor`: measures this machine and reports missing parts of a run, with remedies.

The verdicts are in findings.py. Invariants: no file or process is left behind; exit code 1 if no
run can work here, 0 if at worst something is slower or weaker than it could be.
"""

from __future__ import annotations

import asyncio
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from async_rl.core.gpus import read_gpus
from async_rl.core.machine import Machine, chosen_gpus, this_machine
from async_rl.launchers.commands import findings
from async_rl.launchers.commands.findings import ENGINES, PACKAGES, Finding
from async_rl.launchers.commands.options import console, open_table
from async_rl.runs.directory import default_output_dir

_BLOCK = b"\0" * 2**20
_BLOCKS = 64
# The median of a few: single ones may wait for other processes.
_SYNCS = 8
_STYLES = {"ok": "green", "weak": "yellow", "bad": "bold red"}


def doctor(
    directory: Annotated[
        Path | None, typer.Option(help="directory for runs; default: output_dir of conf/")
    ] = None,
) -> None:
    """Check this machine: versions, cores, GPUs, jail, memory, disk. Exit code 1 if no run can work
    here.

    Examples: async-rl doctor; async-rl doctor --directory /data/runs
    """
    table = open_table("", "subject", "result", "remedy")
    is_usable = True
    for finding in examine(this_machine(), directory or default_output_dir()):
        style = _STYLES[finding.state]
        table.add_row(
            Text(finding.state, style=style),
            finding.subject,
            Text(finding.result),
            Text(finding.remedy),
        )
        # A weak finding makes runs slower or less protected, not impossible.
        is_usable = is_usable and finding.state != "bad"
    console().print(table)
    raise typer.Exit(0 if is_usable else 1)


def examine(machine: Machine, directory: Path) -> Iterator[Finding]:
    """Yield all findings, the cheap ones first."""
    yield findings.of_python(sys.version_info[:2], platform.system(), platform.machine())
    yield findings.of_packages({name: _version(name) for name in (*PACKAGES, *ENGINES)})
    yield findings.of_cores(len(machine.cores))
    yield findings.of_memory(machine.memory_mb)
    gpus = read_gpus()
    yield findings.of_gpus(machine, gpus, chosen_gpus(os.environ), _nccl())
    yield _shared_memory(len(gpus.devices))
    yield _disk(directory)
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
            os.ftruncate(fd, len(_BLOCK))
            os.pwrite(fd, _BLOCK, 0)
        finally:
            os.close(fd)
        space = os.statvfs("/dev/shm")
    except OSError as error:
        remedy = "allow memfd_create and mount /dev/shm (docker run --shm-size=1g)"
        return Finding("shared memory", "bad", str(error), remedy)
    free_mb = space.f_bavail * space.f_frsize // 2**20
    return findings.of_shared_memory(free_mb, num_gpus=num_gpus)


def _disk(directory: Path) -> Finding:
    """Measure a temporary file in the nearest existing directory."""
    directory = directory.absolute()
    # The directory of runs may not exist before the first run.
    nearest = next(path for path in (directory, *directory.parents) if path.is_dir())
    try:
        # Without a name: nothing stays behind if the command is killed.
        with tempfile.TemporaryFile(dir=nearest, buffering=0) as file:
            started_s = time.perf_counter()
            for _ in range(_BLOCKS):
                file.write(_BLOCK)
            os.fsync(file.fileno())
            write_mb_s = _BLOCKS / (time.perf_counter() - started_s)
            sync_ms = statistics.median(_sync_ms(file.fileno()) for _ in range(_SYNCS))
    except OSError as error:
        remedy = "set output_dir to a writable directory with free space"
        return Finding("disk", "bad", f"{nearest}: {error.strerror}", remedy)
    space = os.statvfs(nearest)
    free_mb = space.f_bavail * space.f_frsize // 2**20
    return findings.of_disk(str(nearest), free_mb, write_mb_s, sync_ms)


def _sync_ms(fd: int) -> float:
    started_s = time.perf_counter()
    os.write(fd, _BLOCK[:4096])
    os.fsync(fd)
    return 1000 * (time.perf_counter() - started_s)


async def _jail() -> Finding:
    from async_rl.sandbox.cell import CellFailed
    from async_rl.sandbox.cells import Cells, Unsafe

    try:
        async with await Cells.start(1) as cells:
            return findings.of_jail(cells.level, cells.reasons)
    except (Unsafe, CellFailed) as error:
        return findings.of_jail(0, [str(error)])
