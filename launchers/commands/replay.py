"""`async-rl replay`: trains the recorded batches of a run again, with its settings or with others,
without generators.

Invariants: nothing of the run is changed; everything that can be refused is refused before a model
is loaded; the processes exit with the command.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from async_rl.buffer.store.connection import STORE_FILE
from async_rl.buffer.store.ledger import reading
from async_rl.buffer.store.trajectories import complete_steps
from async_rl.composition import schema
from async_rl.composition.compose import recompose, write_config
from async_rl.composition.schema import changes
from async_rl.config.checks.run import raise_if_any
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError, InfrastructureError
from async_rl.core.machine import this_machine
from async_rl.core.ranges import ranges
from async_rl.launchers.commands.options import OutputDir, Run, console
from async_rl.launchers.commands.replayed_table import replayed
from async_rl.launchers.commands.reports import print_report
from async_rl.planning.topology import processes
from async_rl.runs.directory import find_run
from async_rl.runs.status import config_of

_CHANGEABLE = ("algorithm.", "learner.")


def replay(
    run: Run = None,
    first: Annotated[
        int | None, typer.Option(min=1, help="first step; default: of the longest recorded stretch")
    ] = None,
    last: Annotated[
        int | None, typer.Option(min=1, help="last step; default: the last recorded one")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="another algorithm.* or learner.* setting"),
    ] = None,
    output_dir: OutputDir = None,
) -> None:
    """Train the recorded batches of a run again and compare each step with the run.

    Examples: async-rl replay; async-rl replay my-run --first 5 --last 12; async-rl replay my-run
    --set learner.optimizer.lr=1e-4 --set algorithm.policy_loss=gspo
    """
    run_dir = find_run(run, output_dir)
    before = config_of(run_dir)
    config = recompose(run_dir / "config.yaml", settings or [])
    changed = changes(before, config)
    _refuse(before, config, list(changed))
    # Before a directory is made: a refused replay leaves nothing.
    start, end = choose(run_dir, first, last)
    directory = _directory(run_dir)
    write_config(config, directory / "config.yaml")
    terminal = console()
    origin = f"the checkpoint of step {start}" if start else "the start model"
    terminal.print(f"replays steps {start + 1} to {end} of {run_dir.name} from {origin}")
    for path, (old, new) in changed.items():
        terminal.print(f"with {path}={schema.show(new)} (was {schema.show(old)})")
    terminal.print(f"its steps so far: {directory / 'metrics.jsonl'}", soft_wrap=True)
    _train(directory, config, start=start, end=end)
    report, is_broken = replayed(run_dir, directory, is_changed=bool(changed))
    print_report(report)
    if is_broken:
        raise typer.Exit(1)


def _refuse(before: RunConfig, config: RunConfig, changed: Sequence[str]) -> None:
    """Raise ConfigError for a change that the recorded batches or the checkpoint cannot follow."""
    problems = [
        f"{path}: a replay trains recorded samples, so only algorithm.* and learner.* can change;"
        " start a new run for this"
        for path in changed
        if not path.startswith(_CHANGEABLE)
    ]
    # Imports ZeroMQ, which --help need not wait for.
    from async_rl.launchers.api.resuming import estimator_problems

    problems += estimator_problems(before, config)
    raise_if_any(problems)


def choose(run_dir: Path, first: int | None, last: int | None) -> tuple[int, int]:
    """Return (version to start from, 0 for the start model; last step).

    Without a first step, the longest recorded stretch up to the last step. Raises ConfigError
    if the batches or the checkpoint are missing.
    """
    from async_rl.core.checksums import damage
    from async_rl.training import checkpoints

    with reading(run_dir / STORE_FILE) as store:
        stored = complete_steps(store)
    if not stored:
        raise ConfigError(
            f"{run_dir.name} has no recorded batch: it trained no step yet, or deleted them;"
            " recording=full keeps the trajectories of all steps"
        )
    end = stored[-1] if last is None else last
    # The steps from the checkpoint on are needed, not only the requested steps.
    starts = [0, *checkpoints.versions(run_dir)]
    usable = [version for version in starts if set(range(version + 1, end + 1)) <= set(stored)]
    usable = [version for version in usable if version < end]
    if first is not None:
        # The nearest checkpoint: fewer steps are repeated before the first requested step.
        usable = [version for version in usable if version < first <= end][-1:]
    for version in usable:
        # An older checkpoint replaces a damaged one; it only repeats more steps.
        if not (version and damage(checkpoints.directory_of(run_dir, version))):
            return version, end
    asked = "" if first is None else f" from step {first}"
    raise ConfigError(
        f"{run_dir.name} cannot be replayed{asked} to step {end}: its batches are recorded for"
        f" steps {ranges(stored)}, its undamaged checkpoints are {starts[1:]}, and a replay starts"
        " at a checkpoint (or at step 1) and needs every batch after it; keep more with"
        " recording=full and checkpoint.keep"
    )


def _directory(run_dir: Path) -> Path:
    """Create the replay's directory."""
    replays = run_dir / "replays"
    # After the largest number, not the count: a replay may have been deleted.
    numbers = [int(path.name) for path in replays.glob("*") if path.name.isdecimal()]
    directory = replays / str(max(numbers, default=0) + 1)
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be made: {error.strerror}") from error
    return directory


def _train(directory: Path, config: RunConfig, *, start: int, end: int) -> None:
    """Run the ranks, which exit with this process. Raises InfrastructureError if one fails."""
    from async_rl.data.prepare import prepare_model

    model_path = prepare_model(config, lambda *_: None)
    # Threads decide the order of sums, so they are those that a run on this machine gets.
    specs = [spec for spec in processes(config, this_machine()) if spec.role == "learner"]
    command = [sys.executable, "-m", "async_rl.training.replaying", str(directory)]
    command += [str(model_path), str(start), str(end), str(os.getpid())]
    ranks: dict[Path, subprocess.Popen[bytes]] = {}
    for spec in specs:
        path = directory / f"rank_{spec.rank}.log"
        with path.open("wb") as log:
            ranks[path] = subprocess.Popen(
                [*command, str(spec.rank)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **spec.env},
            )
    for path, process in ranks.items():
        if process.wait():
            text = path.read_text(errors="replace")
            reason = text.strip().splitlines()[-1:] or ["no reason given"]
            raise InfrastructureError(
                f"a rank of the replay exited with code {process.returncode}: {reason[0]}; all of"
                f" it is in {path}"
            )
