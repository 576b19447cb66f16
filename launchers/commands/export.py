"""`async-rl export`: the policy of a checkpoint as a Hugging Face model directory with tokenizer.

Runs in the command's process on one CPU; the run may continue at the same time.
"""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.launchers.commands.options import OutputDir, RunName
from async_rl.runs.directory import find_run
from async_rl.runs.status import config_of


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
    _write_model(run_dir, config, directory, version, is_adapter=adapter)
    typer.echo(f"the policy of {run_dir.name} after step {version} is in {directory}")


def saved_version(run_dir: Path, step: int | None) -> int:
    """Return the version of the checkpoint of `step`, or the newest. Raises ConfigError if the run
    has no such checkpoint.
    """
    from async_rl.training import checkpoints

    saved = checkpoints.versions(run_dir)
    if step is None and saved:
        return saved[-1]
    if step is not None and step in saved:
        return step
    of_step = "" if step is None else f" of step {step}"
    raise ConfigError(f"{run_dir.name} has no checkpoint{of_step}; there are {saved}")


def _write_model(
    run_dir: Path, config: RunConfig, target: Path, version: int, *, is_adapter: bool
) -> None:
    import torch  # takes seconds to import, which other commands do not need

    from async_rl.data.prepare import prepare_model
    from async_rl.learner.trainer import Trainer
    from async_rl.training import checkpoints

    start_model = prepare_model(config, lambda *_: None)
    trainer = Trainer(
        config,
        start_model,
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
        failed_batches=run_dir / "failed_batches",
    )
    trainer.load(checkpoints.verified(run_dir, version))
    if is_adapter:
        trainer.export_adapter(target)
        return
    trainer.export_hf(target)
    # Tokenizer, chat template and code of the model, which training does not change.
    for path in start_model.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and not (target / path.name).exists():
            shutil.copy(path, target)
