"""The commands that take the policy of a checkpoint: `async-rl eval` and `export`.

`eval` evaluates a checkpoint or any model on held-out prompts, without a run. Invariants: prompts,
rewards and figures are computed as in a run; the table or JSON goes to stdout, progress to stderr;
exit code 0 if every prompt has a sample, 1 if some have none, 2 for wrong settings.
`export` writes a Hugging Face model directory with tokenizer. It runs in the command's process on
one CPU; the run may continue at the same time.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from async_rl.config.checks.run import problems, raise_if_any
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.launchers.commands.options import (
    AsJson,
    OutputDir,
    RunName,
    cell,
    show_preparation,
    show_progress,
    split_conf,
)
from async_rl.runs.directory import default_output_dir, find_run
from async_rl.runs.status import config_of
from async_rl.training import checkpoints

_ONLY_FOR_TRAINING = " with data.train_files=[]: "
"""A part of the one problem of a configuration that does not matter without training."""
_QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


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
            help="settings; without conf= the settings of the run",
        ),
    ] = None,
    as_json: AsJson = False,
    output_dir: OutputDir = None,
) -> None:
    """Evaluate a checkpoint or a model on held-out prompts, without training.

    Examples: async-rl eval my-run evaluation.num_samples=4; async-rl eval MODEL conf=ppo_math
    data.val_files=test.jsonl
    """
    from async_rl.composition.compose import recompose

    # What libraries say while they load models hides the figures; errors are raised.
    os.environ.update(_QUIET)
    warnings.simplefilter("ignore")
    conf, overrides = split_conf(settings or [])
    run_dir, step = run_of(checkpoint, output_dir or default_output_dir())
    # The exported policy is needed for this command only.
    with tempfile.TemporaryDirectory(prefix="async_rl_eval") as scratch:
        if run_dir is None:
            from async_rl.composition.overrides import with_defaults
            from async_rl.data.model_files import prepare_model

            config = composed(conf, with_defaults([f"model.path={checkpoint}"], overrides))
            version = 0
            model_path = prepare_model(config, show_preparation)
        else:
            if conf is None:
                config = recompose(config_of(run_dir), overrides)
            else:
                config = composed(conf, overrides)
            model_path = Path(scratch) / "model"
            version = export_model(run_dir, step, model_path)
        scalars, num_failed = _evaluate(config, model_path, version)
    if as_json:
        head = {"checkpoint": checkpoint, "version": version, "failed_prompts": num_failed}
        typer.echo(msgspec.json.encode(head | scalars))
    else:
        failed = f", {num_failed} prompts without a sample" * bool(num_failed)
        typer.echo(f"{checkpoint}, version {version}{failed}")
        for name, value in scalars.items():
            # An error is printed behind its value.
            if not name.endswith("_error"):
                error = scalars.get(f"{name}_error")
                interval = "" if error is None else f" +- {cell(error)}"
                typer.echo(f"  {name.removeprefix('eval/'):16}{cell(value):>10}{interval}")
    if num_failed:
        raise typer.Exit(1)


def run_of(checkpoint: str, output_dir: Path) -> tuple[Path | None, int | None]:
    """Return the run and the step of its checkpoint (None = newest), or no run for a model."""
    path = Path(checkpoint).expanduser().absolute()
    step = path.name.removeprefix("step_")
    if path.parent.name == "checkpoints" and step.isdecimal():
        return find_run(str(path.parents[1]), output_dir), int(step)
    candidates = (output_dir / checkpoint, path)
    if any((directory / "config.yaml").is_file() for directory in candidates):
        return find_run(checkpoint, output_dir), None
    # A hub name has an owner; a single word is a misspelled run.
    if "/" not in checkpoint and not path.is_dir():
        raise ConfigError(
            f"{checkpoint} is neither a run nor a model: {output_dir} has no such run; give a run,"
            " a model's directory, or a hub name (owner/name)"
        )
    return None, None


def composed(conf: str | None, overrides: list[str]) -> RunConfig:
    """Return the configuration of a model without a run. Raises ConfigError."""
    from async_rl.composition.compose import compose_unchecked
    from async_rl.composition.files import names

    if conf is None:
        raise ConfigError(
            "a model without a run has no settings: give conf=<file or one of"
            f" {', '.join(names())}>"
        )
    config = compose_unchecked(conf, overrides)
    relevant = [text for text in problems(config) if _ONLY_FOR_TRAINING not in text]
    raise_if_any(relevant)
    return config


def export_model(run_dir: Path, step: int | None, target: Path) -> int:
    """Write the policy of the checkpoint as a model and return its version.

    Uses another process, because the engine must set up this one before torch is imported.
    """
    version = saved_version(run_dir, step)
    command = [sys.executable, "-m", "async_rl.launchers.cli", "export"]
    command += [str(run_dir), str(target), "--step", str(version)]
    done = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise ConfigError(
            f"{run_dir.name}: the checkpoint of step {version} cannot be exported:"
            f" {done.stderr.strip()[-2000:]}"
        )
    return version


def _evaluate(config: RunConfig, model_path: Path, version: int) -> tuple[dict[str, float], int]:
    from async_rl.generation.environment import prepare_environment

    prepare_environment(config, ())
    # It requests vLLM's warnings, which belong into a generator's log.
    os.environ.update(_QUIET)
    from async_rl.rollouts import standalone  # imports torch, which needs the environment above

    on_done = partial(show_progress, things="prompts")
    return asyncio.run(standalone.evaluate(config, model_path, version=version, on_done=on_done))


def export(
    run: RunName,
    directory: Annotated[Path, typer.Argument(help="the directory to write the model to")],
    step: Annotated[
        int | None, typer.Option(help="step of the checkpoint; default: the newest")
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="write the LoRA adapter alone, in PEFT's format")
    ] = False,
    output_dir: OutputDir = None,
) -> None:
    """Write the policy of a checkpoint as a Hugging Face model.

    Examples: async-rl export my-run model/; async-rl export my-run model/ --step 40
    """
    run_dir = find_run(run, output_dir)
    config = config_of(run_dir)
    # Before the target is looked at: a wrong step is the more likely mistake.
    version = saved_version(run_dir, step)
    if adapter and config.model.adapter is None:
        raise ConfigError(
            f"{run_dir.name} has model.lora=none and so no adapter; omit --adapter to write the"
            " model"
        )
    # Files of another model would mix with this one.
    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty; name an empty or a new directory")
    import torch  # takes seconds to import, which other commands do not need

    from async_rl.data.model_files import prepare_model
    from async_rl.learner.trainer import Trainer

    start_model = prepare_model(config, lambda *_: None)
    trainer = Trainer(config, start_model, rank=0, world_size=1, device=torch.device("cpu"))
    trainer.load(checkpoints.verified(run_dir, version))
    if adapter:
        trainer.export_adapter(directory)
    else:
        trainer.export_hf(directory)
        # Tokenizer, chat template and code of the model, which training does not change.
        for path in start_model.iterdir():
            is_written = (directory / path.name).exists()
            if path.is_file() and path.suffix != ".safetensors" and not is_written:
                shutil.copy(path, directory)
    typer.echo(f"the policy of {run_dir.name} after step {version} is in {directory}")


def saved_version(run_dir: Path, step: int | None) -> int:
    """Return the version of the checkpoint of `step`, or the newest. Raises ConfigError if the run
    has no such checkpoint.
    """
    saved = checkpoints.versions(run_dir)
    if step is None and saved:
        return saved[-1]
    if step is not None and step in saved:
        return step
    of_step = "" if step is None else f" of step {step}"
    raise ConfigError(f"{run_dir.name} has no checkpoint{of_step}; there are {saved}")
