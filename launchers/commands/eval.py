"""`async-rl eval`: a checkpoint or any model on the held-out prompts, without a run.

Invariants: figures, prompts and rewards are made as in a run; the table or JSON goes to stdout,
progress to stderr; exit code 0 if every prompt counts, 1 if some have no sample, 2 for wrong
settings.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from async_rl.config.checks.run import problems, raise_if_any
from async_rl.core.errors import ConfigError
from async_rl.launchers.commands import runs
from async_rl.launchers.commands.options import OutputDir, complete_setting, default_output_dir

if TYPE_CHECKING:
    from async_rl.config.run import RunConfig
    from async_rl.rollouts.standalone import Standalone


def evaluate(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="RUN/checkpoints/step_N, a run (its newest), a model's directory, or its hub name"
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[conf=NAME] [key=value ...]",
            help="settings; a run's own unless conf= is given",
            autocompletion=complete_setting,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON")] = False,
    output_dir: OutputDir = None,
) -> None:
    """Evaluate a checkpoint or a model on held-out prompts, without training.

    Examples: async-rl eval my-run evaluation.num_samples=4; async-rl eval MODEL conf=ppo_math
    data.val_files=test.jsonl
    """
    given = list(settings or [])
    conf = next(
        (setting.removeprefix("conf=") for setting in given if setting.startswith("conf=")), None
    )
    overrides = [setting for setting in given if not setting.startswith("conf=")]
    run_dir, step = _run_of(checkpoint, output_dir or default_output_dir())
    with tempfile.TemporaryDirectory(prefix="async_rl_eval") as scratch:
        if run_dir is None:
            config, version = _composed(conf, [f"model.path={checkpoint}", *overrides]), 0
            from async_rl.data.prepare import prepare_model

            model_path = prepare_model(config, lambda _, text: typer.echo(text, err=True))
        else:
            config = _composed(conf, overrides) if conf is not None else _of_run(run_dir, overrides)
            model_path = Path(scratch) / "model"
            version = _export(run_dir, step, model_path)
        found = _evaluate(config, model_path, version)
    if as_json:
        typer.echo(
            msgspec.json.encode(
                {
                    "checkpoint": checkpoint,
                    "version": version,
                    "failed_prompts": found.num_failed,
                    **found.scalars,
                }
            )
        )
    else:
        _show(checkpoint, found)
    if found.num_failed:
        raise typer.Exit(1)


def _run_of(checkpoint: str, output_dir: Path) -> tuple[Path | None, int | None]:
    """(the run, the step of its checkpoint or None for the newest); no run where a model is named."""
    path = Path(checkpoint).expanduser().absolute()
    if path.parent.name == "checkpoints" and path.name.removeprefix("step_").isdecimal():
        return runs.find(str(path.parents[1]), output_dir), int(path.name.removeprefix("step_"))
    if any((directory / "config.yaml").is_file() for directory in (output_dir / checkpoint, path)):
        return runs.find(checkpoint, output_dir), None
    return None, None


def _composed(conf: str | None, overrides: list[str]) -> RunConfig:
    from async_rl.launchers.configuration.compose import compose_unchecked, names

    if conf is None:
        raise ConfigError(
            "a model without a run has no settings of its own: give conf=<file or one of"
            f" {', '.join(names())}>"
        )
    config = compose_unchecked(conf, overrides)
    raise_if_any(
        problem
        for problem in problems(config)
        if not problem.startswith("data.val_files is set but")
    )  # nothing is trained
    return config


def _of_run(run_dir: Path, overrides: list[str]) -> RunConfig:
    from async_rl.launchers.configuration.compose import recompose

    return recompose(run_dir / "config.yaml", overrides)


def _export(run_dir: Path, step: int | None, target: Path) -> int:
    """Writes the policy of the checkpoint as a model, in a process of its own: the engine must find
    torch not yet imported. Its version.
    """
    from async_rl.training import checkpoints

    saved = checkpoints.versions(run_dir)
    if not saved or (step is not None and step not in saved):
        raise ConfigError(
            f"{run_dir.name} has no checkpoint{f' of step {step}' if step is not None else ''};"
            f" there are {saved}"
        )
    version = saved[-1] if step is None else step
    command = [
        sys.executable,
        "-m",
        "async_rl.launchers.cli",
        "export",
        str(run_dir),
        str(target),
        "--step",
        str(version),
    ]
    done = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise ConfigError(
            f"{run_dir.name}: the checkpoint of step {version} cannot be exported:"
            f" {done.stderr.strip()[-2000:]}"
        )
    return version


def _evaluate(config: RunConfig, model_path: Path, version: int) -> Standalone:
    from async_rl.generation.environment import prepare_environment

    prepare_environment(config, ())
    from async_rl.rollouts import standalone  # imports torch

    def on_done(num_done: int, total: int) -> None:
        if num_done % 64 == 0 or num_done == total:
            typer.echo(f"{num_done} of {total} prompts", err=True)

    return asyncio.run(standalone.evaluate(config, model_path, version=version, on_done=on_done))


def _show(checkpoint: str, found: Standalone) -> None:
    typer.echo(
        f"{checkpoint}, version {found.version}"
        + (f", {found.num_failed} prompts without a sample" if found.num_failed else "")
    )
    for name, value in found.scalars.items():
        error = found.scalars.get(f"{name}_error")
        if not name.endswith("_error"):
            typer.echo(
                f"  {name.removeprefix('eval/'):16}{value:10.4f}"
                + (f" +- {error:.4f}" if error is not None else "")
            )
