"""`async-rl replay`: trains the recorded batches of a run again, with its settings or with others,
without generators.

Invariants: nothing of the run is changed; everything that can be refused is refused before a model
is loaded; the processes exit with the command.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from async_rl.buffer.store.ledger import reading
from async_rl.buffer.store.trajectories import complete_steps
from async_rl.composition.compose import recompose, write_config
from async_rl.composition.schema import changes
from async_rl.config.checks.run import raise_if_any
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError, InfrastructureError
from async_rl.core.machine import this_machine
from async_rl.core.text import ranges
from async_rl.launchers.commands.options import OutputDir, RunName, Settings, console
from async_rl.planning.topology import processes
from async_rl.runs.directory import find_run
from async_rl.runs.status import config_of
from async_rl.training import checkpoints

_CHANGEABLE = ("algorithm.", "learner.")
_CAUSES = (
    "other code, hardware, number of threads or ranks, or settings that changed at a resume"
    " (config.<n>.yaml)"
)


def replay(
    run: RunName,
    settings: Settings = None,
    last: Annotated[
        int | None, typer.Option(min=1, help="last step; default: the last recorded one")
    ] = None,
    output_dir: OutputDir = None,
) -> None:
    """Train the longest recorded stretch of batches again and compare the weights with the run's.
    Settings of algorithm.* and learner.* can differ; the weights are then not compared.

    Examples: async-rl replay my-run; async-rl replay my-run --last 12; async-rl replay my-run
    learner.optimizer.lr=1e-4 algorithm.policy_loss=gspo
    """
    # Imports ZeroMQ, which --help need not wait for.
    from async_rl.launchers.api.resuming import estimator_problems

    run_dir = find_run(run, output_dir)
    before = config_of(run_dir)
    config = recompose(before, settings or [])
    changed = list(changes(before, config))
    refused = [
        f"{path}: a replay trains recorded samples, so only algorithm.* and learner.* can change;"
        " start a new run for this"
        for path in changed
        if not path.startswith(_CHANGEABLE)
    ]
    raise_if_any([*refused, *estimator_problems(before, config)])
    # Before a directory is made: a refused replay leaves nothing.
    start, end = choose(run_dir, last)
    replays = run_dir / "replays"
    # After the largest number, not the count: a replay may have been deleted.
    numbers = [int(path.name) for path in replays.glob("*") if path.name.isdecimal()]
    directory = replays / str(max(numbers, default=0) + 1)
    directory.mkdir(parents=True)
    write_config(config, directory / "config.yaml")
    terminal = console()
    origin = f"the checkpoint of step {start}" if start else "the start model"
    terminal.print(f"replays steps {start + 1} to {end} of {run_dir.name} from {origin}")
    terminal.print(f"its steps so far: async-rl view --output-dir {replays}", soft_wrap=True)
    _train(directory, config, start=start, end=end)
    # Other settings give other weights.
    if changed:
        return
    sentence, is_equal = verdict(run_dir, directory)
    terminal.print(sentence, soft_wrap=True)
    if not is_equal:
        raise typer.Exit(1)


def verdict(run_dir: Path, directory: Path) -> tuple[str, bool]:
    """Compare the weights of an unchanged replay with the run's; return a sentence, and whether no
    step differs. directory: of the replay, whose checksums have the form of a run's.
    """
    recorded = checkpoints.published_checksums(run_dir)
    own = checkpoints.published_checksums(directory)
    # A run writes checksums of published versions only (weights.push_every_steps).
    compared = [step for step in own if step in recorded]
    different = [step for step in compared if own[step] != recorded[step]]
    if different:
        return f"the weights differ from the run's from step {different[0]} on: {_CAUSES}", False
    if not compared:
        return "the run has no checksums of these versions: the weights were not compared", True
    return f"the weights equal the run's at all {len(compared)} compared steps", True


def choose(run_dir: Path, last: int | None) -> tuple[int, int]:
    """Return (version to start from, 0 for the start model; last step) of the longest recorded
    stretch up to the last step. Raises ConfigError if the batches or the checkpoint are missing.
    """
    from async_rl.core.checksums import damage

    with reading(run_dir) as store:
        stored = complete_steps(store)
    if not stored:
        raise ConfigError(
            f"{run_dir.name} has no recorded batch: it trained no step yet, or deleted them;"
            " recording=full keeps the trajectories of all steps"
        )
    end = stored[-1] if last is None else last
    starts = [0, *checkpoints.versions(run_dir)]
    for version in starts:
        is_recorded = version < end and set(range(version + 1, end + 1)) <= set(stored)
        # After a damaged checkpoint the next one: it repeats fewer steps.
        if is_recorded and not (version and damage(checkpoints.directory_of(run_dir, version))):
            return version, end
    raise ConfigError(
        f"{run_dir.name} cannot be replayed to step {end}: its batches are recorded for"
        f" steps {ranges(stored)}, its undamaged checkpoints are {starts[1:]}, and a replay starts"
        " at a checkpoint (or at step 1) and needs every batch after it; keep more with"
        " recording=full and checkpoint.keep"
    )


def _train(directory: Path, config: RunConfig, *, start: int, end: int) -> None:
    """Run the ranks, which exit with this process. Raises InfrastructureError if one fails."""
    from async_rl.data.model_files import prepare_model

    model_path = prepare_model(config, lambda *_: None)
    # Threads decide the order of sums, so they are those that a run on this machine gets.
    specs = [spec for spec in processes(config, this_machine()) if spec.role == "learner"]
    command = [sys.executable, "-m", "async_rl.training.replaying", str(directory)]
    command += [str(model_path), str(start), str(end), str(os.getpid())]
    path = directory / "ranks.log"
    with path.open("ab") as log:
        ranks = [
            subprocess.Popen(
                [*command, str(spec.rank)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **spec.env},
            )
            for spec in specs
        ]
        codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise InfrastructureError(
            f"the ranks of the replay exited with the codes {codes}; {path} has the reason, which"
            f" ends with: {path.read_text(errors='replace').strip()[-200:]}"
        )
