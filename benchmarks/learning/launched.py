"""One launched run of a study: as a user launches it, with its rows and nothing else left."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from benchmarks.study import Row


def launched(
    words: Sequence[str], *, kept: Collection[str], look: Callable[[Path], None] = lambda _: None
) -> list[Row]:
    """Make the run of these settings and return the kept columns of each step. look: receives the
    run's directory before it is removed. Raises SystemExit with the output of a run that fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        command = [str(Path(sys.executable).with_name("async-rl")), "launch", *words]
        command += [f"output_dir={scratch}", "run_name=run", "monitoring.tensorboard_port=null"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SystemExit(f"exit code {done.returncode} of {command}\n{done.stdout}")
        lines = (Path(scratch) / "run" / "metrics.jsonl").read_text().splitlines()
        look(Path(scratch) / "run")
    rows = [json.loads(line) for line in lines]
    return [{name: row[name] for name in kept if name in row} for row in rows]
