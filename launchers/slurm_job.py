"""The batch step of launcher=slurm: `python -m async_rl.launchers.slurm_job RUN_DIR`.

`async-rl launch` has made the directory; launchers/backends/slurm.py writes the script that runs
this module.
"""

from __future__ import annotations

import sys
from pathlib import Path

from async_rl.launchers.backends.choosing import make_launcher
from async_rl.launchers.commands import runs
from async_rl.launchers.commands.control import leave_mark
from async_rl.processes.supervisor import run_supervised


def main() -> int:
    """Supervise the run to its end and return its exit code, which becomes the job's."""
    run_dir = Path(sys.argv[1])
    config = runs.config_of(run_dir)
    leave_mark(run_dir)
    return run_supervised(config=config, run_dir=run_dir, launcher=make_launcher(config, run_dir))


if __name__ == "__main__":
    sys.exit(main())
