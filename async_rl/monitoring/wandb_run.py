"""A run in Weights & Biases, where that is installed and monitoring.wandb names a project: each row
of metrics.jsonl once it is final.

The only file that imports wandb, which is no dependency of ours.  WANDB_MODE=offline keeps
everything in the run's directory. Used by the supervisor's monitor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from async_rl.config.run import RunConfig
from async_rl.core.errors import InfrastructureError


class WandbRun:
    """One run, under the name of its directory; a resumed run goes on there. Raises
    InfrastructureError if it cannot be begun.
    """

    def __init__(self, project: str, run_dir: Path, config: RunConfig) -> None:
        import wandb

        try:
            self._run = wandb.init(
                project=project,
                name=run_dir.name,
                id=run_dir.name,
                resume="allow",
                dir=str(run_dir),
                config=msgspec.to_builtins(config),
                # The terminal is ours, and so are its signals.
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            raise InfrastructureError(
                f"monitoring.wandb={project}: {error}; wandb login, or WANDB_MODE=offline in the"
                " environment, or monitoring.wandb=null"
            ) from error

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """The numbers of one step; steps come in order."""
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """Ends the run there; what is not sent yet is sent first."""
        self._run.finish()
