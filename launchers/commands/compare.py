"""`async-rl compare`: where two runs part, and how settings, results and times differ."""

from async_rl.launchers.commands.options import OutputDir, RunName
from async_rl.launchers.commands.reports import print_report
from async_rl.runs import comparison
from async_rl.runs.directory import find_run


def compare(one: RunName, other: RunName, output_dir: OutputDir = None) -> None:
    """Find the first step and input that differ between two runs; compare settings, results, times.
    A page of `async-rl view` has the same with the curves of both.

    Examples: async-rl compare run-1 run-2
    """
    print_report(comparison.compare(find_run(one, output_dir), find_run(other, output_dir)))
