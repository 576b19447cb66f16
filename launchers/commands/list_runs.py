"""`async-rl runs`: the runs of a directory in a table, the newest first."""

from async_rl.launchers.commands.options import OutputDir, console, print_table
from async_rl.runs.directory import default_output_dir
from async_rl.runs.view.library import Library, Summary
from async_rl.runs.view.texts import duration, number


def list_runs(output_dir: OutputDir = None) -> None:
    """List the runs of a directory: state, step, held-out result, duration.

    Examples: async-rl runs; async-rl runs --output-dir /data/runs
    """
    directory = output_dir or default_output_dir()
    summaries = [run.summary() for run in Library(directory).runs()]
    # A table without rows would look like a fault.
    if not summaries:
        console().print(f"no run in {directory}; start one with async-rl launch conf=ppo_code")
        return
    titles = "run,state,step,held-out pass@1,best,reward,duration,settings"
    print_table(titles.split(","), map(_cells, summaries))


def _cells(run: Summary) -> tuple[str, ...]:
    return (
        run.name,
        f"{run.state}: {run.cause}" if run.cause else str(run.state),
        f"{run.step} of {run.num_steps}",
        run.held_out,
        run.best,
        number(run.reward),
        duration(run.result.duration_s),
        run.settings,
    )
