"""The batch step of launcher=slurm: supervises the run whose directory is given, which `async-rl
launch` has made.

`python -m async_rl.launchers.slurm_job RUN_DIR`, in the script that launchers/backends/slurm.py
writes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from async_rl.launchers.backends.choosing import make_launcher
from async_rl.launchers.commands import runs
from async_rl.launchers.commands.control import leave_mark
from async_rl.processes.supervisor import run_supervised


def main() -> int:
    """Runs it to its end; its exit code becomes the job's."""
    run_dir = Path(sys.argv[1])
    config = runs.config_of(run_dir)
    leave_mark(run_dir)
    return run_supervised(config=config, run_dir=run_dir, launcher=make_launcher(config, run_dir))


if __name__ == "__main__":
    sys.exit(main())
