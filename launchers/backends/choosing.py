"""From `launcher=` to the launcher, and what each launcher needs of this machine.

The only module that knows all launchers. Ray is imported only if it is chosen.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from async_rl.config.launchers import LocalLaunch, RayLaunch, SlurmLaunch
from async_rl.config.run import RunConfig
from async_rl.core.extras import missing
from async_rl.launchers.backends.local import LocalLauncher
from async_rl.launchers.backends.slurm import SlurmLauncher, is_inside_job, refusal
from async_rl.supervision.launcher import Launcher

# A head on the same network answers in milliseconds; a wrong address never answers.
_CONNECT_S = 5.0


def make_launcher(config: RunConfig, run_dir: Path) -> Launcher:
    """Return the launcher that the configuration names."""
    match config.launcher:
        case RayLaunch():
            from async_rl.launchers.backends.ray import RayLauncher

            return RayLauncher(run_dir, config)
        case SlurmLaunch():
            return SlurmLauncher(run_dir, config)
        case LocalLaunch():
            return LocalLauncher(run_dir)


def launcher_problems(config: RunConfig) -> Iterator[str]:
    """Yield the reasons why this machine cannot launch with `launcher=`, one line each."""
    match config.launcher:
        case RayLaunch(address=address):
            yield from _ray_problems(address)
        case SlurmLaunch():
            yield from _slurm_problems(config)


def _ray_problems(address: str) -> Iterator[str]:
    problem = missing("ray", "launcher=ray")
    if problem is not None:
        yield f"{problem}, on every node"
    host, _, port = address.rpartition(":")
    # "auto" and "local" name no address to try.
    if not port.isdigit():
        return
    problem = cannot_reach(host, int(port))
    if problem is not None:
        yield (
            f"launcher.address={address}: no answer ({problem}); give HOST:PORT of the cluster's"
            " head"
        )


def _slurm_problems(config: RunConfig) -> Iterator[str]:
    if not is_inside_job() and shutil.which("sbatch") is None:
        yield "launcher=slurm: sbatch is missing here; launch from a machine that submits jobs"
    elif shutil.which("srun") is None:
        yield "launcher=slurm: srun is missing here; install Slurm's commands"
    elif not is_inside_job():
        problem = refusal(config)
        if problem:
            yield (
                f"launcher=slurm: sbatch --test-only refuses the job: {problem}; correct launcher.*"
            )


def cannot_reach(host: str, port: int) -> str | None:
    """Return why no connection to the address is possible, or None if one is."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError as error:
        return str(error)
    return None
