"""`async-rl launch`, `serve` and `resume`: check a configuration, show the plan of its processes,
then supervise the run.

Invariant: nothing is started or written unless the configuration fits this machine.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from async_rl.composition.hardware import described, model_shape
from async_rl.config.pools import config_of, pool_of
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.core.machine import Machine, this_machine
from async_rl.core.text import ranges
from async_rl.core.types import Role
from async_rl.launchers.api import starting
from async_rl.launchers.backends.backend import job_to_submit
from async_rl.launchers.backends.cluster import cluster_cpus
from async_rl.launchers.commands.options import OutputDir, Port, Settings, console, split_conf
from async_rl.monitoring.terminal import Terminal, open_table
from async_rl.planning.estimate import gpu_memory_mb, memory_mb
from async_rl.planning.fit import derived_numbers, reasons
from async_rl.planning.presets import fleet
from async_rl.planning.topology import ProcessSpec, processes
from async_rl.runs.control import owning
from async_rl.runs.directory import default_output_dir, find_run
from async_rl.wire.addresses import LOOPBACK

_SERVICE = "serve"
"""The configuration of a service."""
_UNKNOWN_NODES = "not known here, so nothing is fitted to it; describe a node with --machine"


def launch(
    settings: Annotated[
        list[str],
        typer.Argument(
            metavar="conf=NAME [key=value ...]",
            help="a name from conf/ or your own yaml file, and settings that differ from it",
        ),
    ],
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="show configuration, processes and derived numbers; start nothing"
        ),
    ] = False,
    other_machine: Annotated[
        str | None,
        typer.Option(
            "--machine",
            metavar="cores=N,gpus=N,gpu_gb=N,memory_gb=N,disk_gb=N",
            help=(
                "plan for a machine of this size instead of this one: with --dry-run, or a node of"
                " a cluster"
            ),
        ),
    ] = None,
) -> None:
    """Start a run and supervise it until it exits.

    Examples: async-rl launch conf=ppo_code; async-rl launch conf=grpo_code num_steps=200; async-rl
    launch conf=ppo_code --dry-run
    """
    # Hydra takes half a second to import, which --help and the other commands do not need.
    from async_rl.composition.compose import to_yaml
    from async_rl.composition.files import names
    from async_rl.composition.hardware import pretended_machine

    conf, overrides = split_conf(settings)
    if conf is None:
        raise ConfigError(f"conf= is missing; give a yaml file, or one of {', '.join(names())}")
    machine = this_machine()
    if other_machine is not None:
        machine = pretended_machine(other_machine)
        if not dry_run:
            # The run is written to the disk of this machine.
            machine = dataclasses.replace(machine, disk_mb=None)
    config, preset = starting.checked_config(conf, overrides, machine)
    # Its cores and GPUs may not exist here.
    if other_machine is not None and not dry_run and config.launcher.is_one_machine:
        raise ConfigError("--machine describes another machine; it requires --dry-run or a cluster")
    specs = processes(config, machine)
    terminal = console(Terminal)
    # The configuration is 170 lines; a run has it in its directory.
    if dry_run:
        terminal.print("configuration", style="bold")
        terminal.out(to_yaml(config), highlight=False)
    show_plan(terminal, config, specs, machine, preset=preset)
    if not dry_run:
        run_dir = starting.make_run_dir(config)
        with owning(run_dir):
            raise typer.Exit(supervise(config, run_dir))
    # The script is what a person checks before hours in a queue.
    if job := job_to_submit(config):
        run_dir = Path(config.output_dir) / str(config.run_name)
        terminal.out(job.script(config, run_dir), highlight=False)


def serve(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[model=PATH] [conf=NAME] [key=value ...]",
            help=(
                "a model, or a name from conf/ whose model is served, and settings that differ from"
                " conf/serve.yaml; default: the embedded model"
            ),
        ),
    ] = None,
    port: Port = 0,
) -> None:
    """Train and sample for programs that speak the Tinker API, until Ctrl-C.

    Examples: async-rl serve; async-rl serve model=build/real/SmolLM2-135M-Instruct; async-rl serve
    conf=real --port 8765
    """
    from async_rl.composition.compose import compose_unchecked
    from async_rl.service.address import address_of, free_port

    conf, overrides = split_conf(settings or [])
    overrides = [
        f"model.path={word.removeprefix('model=')}" if word.startswith("model=") else word
        for word in overrides
    ]
    if conf not in (None, _SERVICE):
        path = compose_unchecked(conf).model.path
        overrides.insert(0, f"model.path={'null' if path is None else path}")
    config, _ = starting.checked_config(_SERVICE, overrides, this_machine())
    port = free_port(port)
    run_dir = starting.make_run_dir(config)
    address = address_of(run_dir, port)
    typer.echo(
        f"export TINKER_BASE_URL=http://{LOOPBACK}:{address.port}\n"
        f"export TINKER_API_KEY={address.api_key}\n"
        f"if the service ends, async-rl resume {run_dir.name} continues it at the same address"
    )
    with owning(run_dir):
        raise typer.Exit(starting.supervise(config, run_dir))


def resume(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help=(
                "name or directory of a run that finished or was killed, or the URL of its copy:"
                " <checkpoint.mirror>/<name>"
            ),
        ),
    ],
    settings: Settings = None,
    output_dir: OutputDir = None,
) -> None:
    """Continue a run from its last checkpoint and its ledger, with settings to change from here on.

    Examples: async-rl resume my-run; async-rl resume my-run num_steps=400; async-rl
    resume s3://bucket/copies/my-run
    """
    from async_rl.launchers.api import resuming
    from async_rl.supervision.scaler import wanted_counts

    if resuming.is_copy(run):
        run_dir = resuming.fetch(run, output_dir or default_output_dir())
    else:
        run_dir = find_run(run, output_dir)
    # Before anything is read: of two that resume at the same time, one must see the changes of the
    # other.
    with owning(run_dir):
        config, changed = resuming.prepare(run_dir, settings or [])
        machine = this_machine()
        specs = processes(config, machine, wanted_counts(config, run_dir))
        terminal = console(Terminal)
        show_plan(terminal, config, specs, machine)
        for line in changed:
            terminal.print(f"resuming with {line}", soft_wrap=True)
        if not changed:
            terminal.print("resuming; no setting has changed")
        raise typer.Exit(supervise(config, run_dir))


def supervise(config: RunConfig, run_dir: Path) -> int:
    """Run to the end and return the exit code. Outside a job, launcher=slurm only submits one."""
    if queue := job_to_submit(config):
        job = queue.submit(config, run_dir)
        name = run_dir.name
        typer.echo(
            f"run {name} is job {job}: async-rl status {name}, async-rl logs {name} --follow,"
            f" squeue --job {job}, scancel {job}"
        )
        return 0
    return starting.supervise(config, run_dir)


def show_plan(
    console: Console,
    config: RunConfig,
    specs: Sequence[ProcessSpec],
    machine: Machine,
    *,
    preset: str = "",
) -> None:
    """Print the process table and the derived numbers. preset: the file of conf/hardware that was
    chosen; empty if it no longer matters.
    """
    shape = model_shape(config)
    everywhere = f"cores {_numbers(machine.cores)}"
    rows: list[tuple[str, Role, str]] = [("supervisor", "supervisor", everywhere)]
    rows += [(spec.name, spec.role, _placement(config, spec, everywhere)) for spec in specs]
    table = open_table("process", "runs on", "memory")
    for name, role, placement in rows:
        # A pool may have engines of another size.
        own = config_of(config, pool_of(name))
        size = f"{memory_mb(own, role, shape)} MB"
        on_gpu = 0 if shape is None else gpu_memory_mb(own, role, shape)
        table.add_row(name, placement, f"{size}, GPU {on_gpu} MB" if on_gpu else size)
    console.print("processes", table, "", sep="\n")
    whole = fleet(config, machine)
    derived = derived_numbers(config, shape)
    if whole is not None:
        derived += reasons(config, shape, whole)
    elif config.learner.gpus_each > 0:
        derived.append(("memory of the nodes", _UNKNOWN_NODES))
    if preset:
        derived.insert(0, ("hardware", f"{preset} ({described(machine)})"))
    numbers = open_table("derived numbers", "")
    for row in derived:
        numbers.add_row(*row)
    console.print(numbers, "", sep="\n")


def _placement(config: RunConfig, spec: ProcessSpec, everywhere: str) -> str:
    # The cluster chooses the node and the cores when the process starts.
    if not config.launcher.is_one_machine:
        gpus = f", {spec.gpus:g} GPU" if spec.gpus else ""
        return f"{cluster_cpus(config, spec)} CPU{gpus} of a node"
    cores = f"cores {_numbers(spec.cores)}" if spec.cores else everywhere
    if not spec.gpus:
        return cores
    return f"GPU {spec.env.get('CUDA_VISIBLE_DEVICES', '?')} ({spec.gpus:g}), {cores}"


def _numbers(cores: Sequence[int]) -> str:
    return ranges(cores, to="-", between=",")
