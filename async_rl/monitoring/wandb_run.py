"""Export of a run to Weights & Biases, if monitoring.wandb names a project: each row of
metrics.jsonl once it is final.

The only file that imports wandb, which is not a dependency of this project.  WANDB_MODE=offline
keeps everything in the run's directory.
"""

from collections.abc import Mapping
from pathlib import Path

from async_rl.config.base import as_builtins
from async_rl.config.run import RunConfig
from async_rl.core.errors import InfrastructureError


class WandbRun:
    """One run, under the name of its directory; a resumed run continues it.

    Raises InfrastructureError if wandb cannot start it.
    """

    def __init__(self, project: str, run_dir: Path, config: RunConfig) -> None:
        import wandb

        try:
            self._run = wandb.init(
                project=project,
                name=run_dir.name,
                # The id makes a resumed run continue the same curves.
                id=run_dir.name,
                # A new id starts a run, a known one continues it.
                resume="allow",
                dir=str(run_dir),
                config=as_builtins(config),
                # The supervisor owns the terminal and its signals.
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            raise InfrastructureError(
                f"monitoring.wandb={project}: {error}; run wandb login, set WANDB_MODE=offline in"
                " the environment, or set monitoring.wandb=null"
            ) from error

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Send the metrics of one step; steps come in order."""
        self._run.log(scalars, step=step)

    def close(self) -> None:
        """Send the remaining rows and end the run."""
        self._run.finish()
