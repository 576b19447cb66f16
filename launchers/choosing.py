"""From `launcher=` to the launcher: the one place that knows all of them.

Called by the command line and by the batch step of launcher=slurm. Ray is imported only where it is asked for.
"""

from __future__ import annotations

from pathlib import Path

from async_rl.config import RunConfig
from async_rl.launchers.local import LocalLauncher
from async_rl.processes.launching import Launcher


def make_launcher(config: RunConfig, run_dir: Path) -> Launcher:
    """What starts this run's processes."""
    match config.launcher:
        case "ray":
            from async_rl.launchers.ray_launcher import RayLauncher

            return RayLauncher(run_dir, config)
        case "slurm":
            from async_rl.launchers.slurm_launcher import SlurmLauncher

            return SlurmLauncher(run_dir, config)
        case "local":
            return LocalLauncher(run_dir)
