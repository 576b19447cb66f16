"""`async-rl explain`: where the time of a run went, and which change would have saved most."""

from async_rl.launchers.commands.options import OutputDir, Run, console
from async_rl.launchers.commands.reports import print_report
from async_rl.runs.directory import find_run
from async_rl.runs.forecast import explain as explaining


def explain(run: Run = None, output_dir: OutputDir = None) -> None:
    """Show where a run's time went by process and stage, and predict the gain of changes.

    Works on finished and on live runs; a page of `async-rl view` has the same. Examples: async-rl
    explain; async-rl explain my-run
    """
    report = explaining.explain(find_run(run, output_dir))
    console().print(f"{report.title}\n")
    print_report(report)
