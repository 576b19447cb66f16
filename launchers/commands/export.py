"""`async-rl export`: the policy of a checkpoint as a Hugging Face model directory, tokenizer
included.

Runs in the command's own process, on one CPU, beside a run if there is one.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.data.prepare import prepare_model
from async_rl.learner.trainer import Trainer
from async_rl.training import checkpoints


def export(run_dir: Path, config: RunConfig, target: Path, version: int | None) -> int:
    """Writes the policy of this version, the newest if None, to `target`; the version. Raises
    ConfigError if there is none.
    """
    saved = checkpoints.versions(run_dir)
    if not saved or (version is not None and version not in saved):
        raise ConfigError(
            f"{run_dir.name} has no"
            f" checkpoint{f' of step {version}' if version is not None else ''}; there are {saved}"
        )
    if target.exists() and any(target.iterdir()):
        raise ConfigError(
            f"{target} is not empty; name a directory that is, or one that does not exist yet"
        )
    version = saved[-1] if version is None else version
    start_model = prepare_model(config, lambda *_: None)
    cpu = torch.device("cpu")
    trainer = Trainer(
        config,
        start_model,
        rank=0,
        world_size=1,
        device=cpu,
        failed_batches=run_dir / "failed_batches",
    )
    trainer.load(checkpoints.directory_of(run_dir, version))
    trainer.export_hf(target)
    for path in start_model.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and not (target / path.name).exists():
            shutil.copy(path, target)
    return version
