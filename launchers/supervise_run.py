"""The supervisor of a run whose directory exists: `python -m async_rl.launchers.supervise_run DIR`.

The batch step of a Slurm job, and the background process of `async_rl.launch` in Python.
"""

import sys
from pathlib import Path

from async_rl.config.checks.run import raise_if_any
from async_rl.core.machine import this_machine
from async_rl.core.os import owner_only
from async_rl.launchers.api.starting import supervise
from async_rl.launchers.preflight.checks import memory_problems
from async_rl.runs.control import leave_mark, owning
from async_rl.runs.status import config_of


@owner_only()
def main() -> int:
    """Supervise the run to its end and return its exit code."""
    run_dir = Path(sys.argv[1])
    config = config_of(run_dir)
    with owning(run_dir):
        leave_mark(run_dir)
        if config.launcher.is_submitted:
            # The machine that submitted the job may have no GPU; this one is a node.
            raise_if_any(memory_problems(config, this_machine()))
        return supervise(config, run_dir)


if __name__ == "__main__":
    sys.exit(main())
