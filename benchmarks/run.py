"""Run the benchmarks one after the other and print one table of their figures.

Run: `python benchmarks/run.py [NAME ...]`.
A benchmark is a module of a subject's folder with a `main()` that prints lines through
`benchmarks.figures.figure`. The table contains these lines; other output is shown immediately. Each
benchmark runs in a separate process, so that it does not inherit memory or threads of another.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# Python adds the folder of a script to sys.path, but not its parent.
from benchmarks.figures import MARK  # noqa: E402

# They take hours and write into benchmarks/results/ and docs/images/.
NO_BENCHMARKS = {
    "run",
    "figures",
    "staleness_report",
    "lora",
    "agent_learning",
    "service_arithmetic",
    "service_distillation",
    "chaos_agents",
}


def names() -> list[str]:
    """Return the names of the benchmarks, as in `learner.attention`."""
    return sorted(
        f"{path.parent.name}.{path.stem}"
        for path in (ROOT / "benchmarks").glob("*/*.py")
        if path.stem not in NO_BENCHMARKS and "figure(" in path.read_text()
    )


def run(name: str) -> tuple[int, list[list[str]]]:
    """Return the exit code of one benchmark and its figures."""
    figures = []
    command = [sys.executable, "-m", f"benchmarks.{name}"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                figures.append(line.rstrip("\n").split("\t")[1:])
            else:
                print(line, end="", flush=True)
    return process.returncode, figures


def main() -> int:
    """Run the benchmarks and return how many failed."""
    wanted = sys.argv[1:] or names()
    if unknown := set(wanted) - set(names()):
        print(
            f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(names())}",
            file=sys.stderr,
        )
        return 2
    table = Table("benchmark", "figure", "value", "unit", "goal", box=None, pad_edge=False)
    num_failed = 0
    for name in wanted:
        print(f"== {name}", flush=True)
        started_s = time.monotonic()
        code, figures = run(name)
        num_failed += code != 0
        for row in figures:
            table.add_row(name, *row)
        if code != 0:
            table.add_row(name, f"failed with exit code {code}", "", "", "")
        print(f"== {name}: {time.monotonic() - started_s:.0f} s", flush=True)
    Console(highlight=False, width=140 if not sys.stdout.isatty() else None).print(table)
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
