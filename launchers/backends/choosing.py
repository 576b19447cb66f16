"""From `launcher=` to the launcher: the one place that knows all of them, and what each needs of
this machine.

Called by the command line (before a launch, by doctor) and by the batch step of launcher=slurm. Ray
is imported only where it is asked for.
"""

from __future__ import annotations

import importlib.util
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from async_rl.config.run import RunConfig
from async_rl.launchers.backends.local import LocalLauncher
from async_rl.launchers.backends.slurm import SlurmLauncher, is_inside_job, refusal
from async_rl.supervision.launcher import Launcher

_CONNECT_S = 5.0


def make_launcher(config: RunConfig, run_dir: Path) -> Launcher:
    """What starts this run's processes."""
    match config.launcher:
        case "ray":
            from async_rl.launchers.backends.ray import RayLauncher

            return RayLauncher(run_dir, config)
        case "slurm":
            return SlurmLauncher(run_dir, config)
        case "local":
            return LocalLauncher(run_dir)


def launcher_problems(config: RunConfig) -> Iterator[str]:
    """Why this machine cannot launch with `launcher=`, one line per reason."""
    match config.launcher:
        case "ray":
            if importlib.util.find_spec("ray") is None:
                yield (
                    "launcher=ray: the package ray is not installed here; pip install ray, on every"
                    " node"
                )
            host, _, port = config.ray.address.rpartition(":")
            if port.isdigit() and (problem := cannot_reach(host, int(port))):
                yield (
                    f"ray.address={config.ray.address}: nobody answers there ({problem}); give"
                    " HOST:PORT of the cluster's head"
                )
        case "slurm":
            if not is_inside_job() and shutil.which("sbatch") is None:
                yield (
                    "launcher=slurm: there is no sbatch here; launch from a machine that submits"
                    " jobs"
                )
            elif shutil.which("srun") is None:
                yield "launcher=slurm: there is no srun here; install Slurm's commands"
            elif not is_inside_job() and (problem := refusal(config)):
                yield (
                    f"launcher=slurm: sbatch --test-only refuses the job: {problem}; correct"
                    " slurm.* and cluster.*"
                )


def cannot_reach(host: str, port: int) -> str | None:
    """Why no connection to the address can be made; None if one can."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError as error:
        return str(error)
    return None
