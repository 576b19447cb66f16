"""The command line: launch a run, ask how it is and what it did, stop it, go on with it.

Invariants: wrong settings exit with 2 before any process starts, a run that fails with 1, one line
per problem, no traceback; nothing heavy (torch, vLLM, transformers) is imported here, ever; output
goes to stdout, problems to stderr.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer

from async_rl.config.run import RunConfig
from async_rl.core.errors import AsyncRLError, ConfigError
from async_rl.core.machine import this_machine
from async_rl.launchers.backends.slurm import is_inside_job, job_script, submit
from async_rl.launchers.commands import runs
from async_rl.launchers.commands.control import ask_stop, leave_mark, living_pid, wait_for_run
from async_rl.launchers.commands.data import data
from async_rl.launchers.commands.doctor import doctor
from async_rl.launchers.commands.eval import evaluate
from async_rl.launchers.commands.init import init
from async_rl.launchers.commands.logs import logs
from async_rl.launchers.commands.migrate import migrate
from async_rl.launchers.commands.options import (
    OutputDir,
    Run,
    complete_run,
    complete_setting,
    console,
    default_output_dir,
)
from async_rl.launchers.commands.rollouts import show_rollouts
from async_rl.launchers.commands.scale import scale
from async_rl.launchers.commands.status import ended, status
from async_rl.launchers.commands.verifier import verifier
from async_rl.launchers.commands.verify import verify
from async_rl.planning.topology import processes

EXIT_WRONG_SETTINGS = 2
STOP_GRACE_S = 60.0  # beyond timeouts.stop_s: the last evaluation and the other processes' ends

app = typer.Typer(
    help="Asynchronous reinforcement learning of language models.",
    no_args_is_help=True,
    epilog=(
        "async-rl --install-completion makes the Tab key complete commands, runs, configurations"
        " and settings."
    ),
    pretty_exceptions_enable=False,
)
app.command()(status)
app.command()(scale)
app.command()(logs)
app.command("rollouts")(show_rollouts)
app.command()(doctor)
app.command()(init)
app.command()(verifier)
app.command()(verify)
app.add_typer(data, name="data")
app.command()(migrate)
app.command("eval")(evaluate)


def main() -> NoReturn:
    """Entry point of `async-rl`."""
    try:
        app()
    except AsyncRLError as error:
        for line in str(error).splitlines():
            typer.echo(f"error: {line}", err=True)
        sys.exit(EXIT_WRONG_SETTINGS if isinstance(error, ConfigError) else 1)
    sys.exit(0)


@app.command()
def launch(
    settings: Annotated[
        list[str],
        typer.Argument(
            metavar="conf=NAME [key=value ...]",
            help="a name from conf/ or a yaml file of yours, and settings that differ from it",
            autocompletion=complete_setting,
        ),
    ],
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="show configuration, processes and derived numbers; start nothing"
        ),
    ] = False,
    pretended: Annotated[
        str | None,
        typer.Option(
            "--machine",
            metavar="cores=N,gpus=N,memory_gb=N",
            help="with --dry-run: the plan on such a machine",
        ),
    ] = None,
) -> None:
    """Start a run and supervise it until it ends.

    Examples: async-rl launch conf=ppo_code; async-rl launch conf=grpo_code num_steps=200; async-rl
    launch conf=ppo_code --dry-run
    """
    from async_rl.launchers.configuration.compose import compose_for
    from async_rl.launchers.configuration.hardware import pretended_machine
    from async_rl.launchers.configuration.plan import show_config, show_plan
    from async_rl.launchers.configuration.preflight import model_shape, preflight

    conf, overrides = split_conf(settings)
    if pretended is not None and not dry_run:
        raise ConfigError("--machine pretends, and so goes with --dry-run only")
    machine = this_machine() if pretended is None else pretended_machine(pretended)
    config, preset = compose_for(machine, conf, overrides)
    preflight(config, machine)
    config = named(config)
    specs = processes(config, machine)
    terminal = console()
    if dry_run:
        show_config(terminal, config)
    show_plan(terminal, config, specs, machine, model_shape(config), preset=preset)
    if dry_run and config.launcher == "slurm":
        terminal.out(
            job_script(config, Path(config.output_dir) / str(config.run_name)), highlight=False
        )
    if not dry_run:
        raise typer.Exit(_supervise(config, make_run_dir(config)))


@app.command()
def stop(
    run: Run = None,
    now: Annotated[
        bool, typer.Option("--now", help="at once: the step in progress is lost")
    ] = False,
    output_dir: OutputDir = None,
) -> None:
    """Finish the step, save and end a run; returns once it has ended.

    Examples: async-rl stop; async-rl stop my-run --now
    """
    run_dir = runs.find(run, output_dir or default_output_dir())
    pid = living_pid(run_dir)
    if pid is None:
        typer.echo(ended(runs.remains(run_dir)))
        return
    ask_stop(run_dir, pid, is_graceful=not now)
    typer.echo(
        f"run {run_dir.name} is ending"
        if now
        else f"run {run_dir.name} is stopping: it finishes its step and saves"
    )
    if not wait_for_run(
        run_dir, pid, timeout_s=runs.config_of(run_dir).timeouts.stop_s + STOP_GRACE_S
    ):
        typer.echo(
            f"error: run {run_dir.name} (pid {pid}) has not ended; async-rl stop {run_dir.name}"
            " --now ends it at once",
            err=True,
        )
        raise typer.Exit(1)
    typer.echo(ended(runs.remains(run_dir)))


@app.command()
def resume(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help=(
                "name or directory of a run that has ended or was killed, or the URL of its copy:"
                " <checkpoint.mirror>/<name>"
            ),
            autocompletion=complete_run,
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key=value ...]", help="settings that differ from here on"),
    ] = None,
    output_dir: OutputDir = None,
) -> None:
    """Go on with a run where its last checkpoint and its ledger stand.

    Examples: async-rl resume my-run; async-rl resume my-run num_steps=400; async-rl resume
    s3://bucket/copies/my-run
    """
    from async_rl.launchers.commands.resume import (
        counts_after_resume,
        fetch,
        is_copy,
        resumed_config,
        take_up,
    )
    from async_rl.launchers.configuration.plan import show_plan
    from async_rl.launchers.configuration.preflight import model_shape, preflight

    directory = output_dir or default_output_dir()
    run_dir = fetch(run, directory) if is_copy(run) else runs.find(run, directory)
    config, changed = resumed_config(run_dir, settings or [])
    machine = this_machine()
    preflight(config, machine, is_new=False)
    specs = processes(config, machine, counts_after_resume(run_dir, config))
    terminal = console()
    show_plan(terminal, config, specs, machine, model_shape(config))
    for line in changed or ["no setting has changed"]:
        terminal.print(
            f"resuming with {line}" if changed else f"resuming; {line}",
            markup=False,
            soft_wrap=True,
        )
    take_up(config, run_dir)
    raise typer.Exit(_supervise(config, run_dir))


@app.command()
def export(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="name or directory of a run", autocompletion=complete_run
        ),
    ],
    directory: Annotated[
        Path, typer.Argument(metavar="DIRECTORY", help="where the model is written")
    ],
    step: Annotated[
        int | None, typer.Option(help="of which checkpoint; default: the newest")
    ] = None,
    output_dir: OutputDir = None,
) -> None:
    """Write the policy of a checkpoint as a Hugging Face model.

    Examples: async-rl export my-run model/; async-rl export my-run model/ --step 40
    """
    from async_rl.launchers.commands.export import (
        export as export_model,
    )  # loads torch and the model

    run_dir = runs.find(run, output_dir or default_output_dir())
    version = export_model(run_dir, runs.config_of(run_dir), directory, step)
    typer.echo(f"the policy of {run_dir.name} after step {version} is in {directory}")


@app.command()
def ledger(
    run: Run = None,
    prompt: Annotated[str | None, typer.Option(help="what became of this prompt")] = None,
    step: Annotated[int | None, typer.Option(help="the groups that this step trained")] = None,
    state: Annotated[str | None, typer.Option(help="the groups in this state")] = None,
    left: Annotated[
        bool,
        typer.Option(
            "--left", help="the prompts that left the data by their mean reward (data.filter)"
        ),
    ] = False,
    summary: Annotated[
        bool, typer.Option("--summary", help="counts; what is shown if nothing else is asked")
    ] = False,
    audit: Annotated[
        bool,
        typer.Option("--audit", help="check the whole history; exit code 0 only if it is clean"),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON")] = False,
    output_dir: OutputDir = None,
) -> None:
    """Tell what became of every prompt of a run, also while it runs.

    Examples: async-rl ledger; async-rl ledger my-run --step 12; async-rl ledger my-run --audit
    """
    from async_rl.buffer.store.audit import Audit
    from async_rl.launchers.commands.ledger import Question, answer, show

    if sum([prompt is not None, step is not None, state is not None, left, summary, audit]) > 1:
        raise ConfigError(
            "--prompt, --step, --state, --left, --summary and --audit are different questions;"
            " ask one"
        )
    run_dir = runs.find(run, output_dir or default_output_dir())
    found = answer(
        run_dir,
        runs.config_of(run_dir),
        Question(prompt=prompt, step=step, state=state, is_left=left, is_audit=audit),
    )
    if as_json:
        typer.echo(msgspec.json.encode(found))
    else:
        show(console(), found)
    if isinstance(found, Audit) and found.problems:
        raise typer.Exit(1)


def split_conf(settings: list[str]) -> tuple[str, list[str]]:
    """`conf=` and the other settings. Raises ConfigError unless there is exactly one conf."""
    from async_rl.launchers.configuration.compose import names

    given = [setting.partition("=")[2] for setting in settings if setting.startswith("conf=")]
    if len(given) != 1:
        raise ConfigError(
            f"conf= is given {len(given)} times; give it once: a yaml file, or one of"
            f" {', '.join(names())}"
        )
    return given[0], [setting for setting in settings if not setting.startswith("conf=")]


def named(config: RunConfig) -> RunConfig:
    """The configuration with a run_name, a fresh one where none was given."""
    if config.run_name is not None:
        return config
    name = runs.unique_name(Path(config.output_dir), rng=random.Random(), now=time.localtime())
    return msgspec.structs.replace(config, run_name=name)


def make_run_dir(config: RunConfig) -> Path:
    """Create the run's directory with the configuration in it, which is written once and never
    changed.
    """
    from async_rl.launchers.configuration.compose import write_config

    run_dir = Path(config.output_dir) / str(config.run_name)
    try:
        run_dir.mkdir(parents=True)
        (run_dir / "logs").mkdir()
        write_config(config, run_dir / "config.yaml")
        leave_mark(run_dir)
    except OSError as error:
        raise ConfigError(
            f"output_dir={config.output_dir}: {run_dir} cannot be made ({error.strerror}); choose"
            " another"
        ) from error
    return run_dir


def _supervise(config: RunConfig, run_dir: Path) -> int:
    if config.launcher == "slurm" and not is_inside_job():
        job = submit(config, run_dir)
        name = run_dir.name
        typer.echo(
            f"run {name} is job {job}: async-rl status {name}, async-rl logs {name} --follow,"
            f" squeue --job {job}, scancel {job}"
        )
        return 0
    from async_rl.launchers.backends.choosing import make_launcher
    from async_rl.processes.supervisor import run_supervised

    return run_supervised(config=config, run_dir=run_dir, launcher=make_launcher(config, run_dir))


if __name__ == "__main__":
    main()
