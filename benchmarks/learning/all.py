"""Make all learning figures of the documents again: every study, in this order, then its report.

Run: `python -m benchmarks.learning.all` (or `make learning`); `--list` prints the studies and the
hours that each takes, `--only NAME...` chooses some. A study with a report keeps every run that it
has finished in benchmarks/results/, so the command resumes where it was stopped; delete the lines
of a run to make it again. The others start anew.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from typing import NamedTuple


class Study(NamedTuple):
    """Commands of `python -m benchmarks.learning.NAME`, and where their figures are.

    hours: of two cores, from nothing to the report, estimated from the costs of single runs.
    """

    name: str
    parts: tuple[str, ...]
    hours: float
    page: str


STUDIES = (
    Study("bias", ("",), 0.1, "algorithms.md#bias"),
    Study("staleness", ("tune", "run", "rates", "whole", "report"), 3, "staleness.md"),
    Study("selection", ("run", "report"), 6, "data.md#order-of-the-prompts"),
    Study("critic", ("run", "report"), 1, "algorithms.md#critic"),
    Study("lora", ("tune", "run", "report"), 1, "algorithms.md#adapters"),
    Study("learning", ("",), 0.5, "performance.md"),
    Study("async_vs_sync", ("",), 0.5, "performance.md"),
    Study("late_admission", ("run",), 2, "decisions/late_admission.md"),
    Study("agent_learning", ("run", "report"), 1, "agents.md"),
    Study("schema_learning", ("build", "run", "report"), 1, "agents.md"),
    Study("reference", ("run", "report --docs"), 2, "performance.md"),
    # These need the model of `make real`, and the last two packages that their docstrings name.
    Study("real_model", ("run", "report"), 2, "tutorials/real_model.md"),
    Study("service_distillation", ("run", "report"), 2, "service.md"),
    Study("service_arithmetic", ("run", "report"), 2, "service.md"),
    Study("against_trl", ("",), 2, "performance.md#against-trl"),
)


def main() -> None:
    """Run the studies. Raises SystemExit at the first that fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the studies and their hours")
    parser.add_argument("--only", nargs="+", choices=[study.name for study in STUDIES])
    given = parser.parse_args()
    chosen = [study for study in STUDIES if not given.only or study.name in given.only]
    for study in chosen:
        print(f"{study.name}: {study.hours:g} hours, docs/{study.page}", flush=True)
    if given.list:
        return
    for study in chosen:
        for part in study.parts:
            command = [sys.executable, "-m", f"benchmarks.learning.{study.name}", *part.split()]
            started_s = time.monotonic()
            if code := subprocess.run(command).returncode:
                raise SystemExit(f"{' '.join(command)}: exit code {code}; correct it and run again")
            print(f"{study.name} {part}: {time.monotonic() - started_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
