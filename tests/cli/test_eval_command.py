"""Facts about `async-rl eval` that need no engine: the choice of checkpoint, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.composition.compose import compose, write_config
from async_rl.core.errors import ConfigError
from async_rl.launchers.commands.models import composed, export_model, run_of


def make_run(tmp_path: Path, *steps: int) -> Path:
    run_dir = tmp_path / "runs" / "mine"
    for step in steps:
        (run_dir / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    run_dir.mkdir(parents=True, exist_ok=True)
    write_config(compose("grpo_code"), run_dir / "config.yaml")
    return run_dir


def test_a_run_a_checkpoint_and_a_model_are_told_apart(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, 2, 4)
    output_dir = tmp_path / "runs"
    assert run_of("mine", output_dir) == (run_dir, None)
    assert run_of(str(run_dir), output_dir) == (run_dir, None)
    assert run_of(str(run_dir / "checkpoints" / "step_000002"), output_dir) == (run_dir, 2)
    assert run_of("owner/name", output_dir) == (None, None)
    with pytest.raises(ConfigError, match="nosuch is neither a run nor a model"):
        run_of("nosuch", tmp_path)
    with pytest.raises(ConfigError, match=r"no checkpoint of step 3; there are \[2, 4\]"):
        export_model(run_dir, 3, tmp_path / "model")


def test_a_model_needs_a_configuration_and_held_out_files_without_files_to_train_on_are_enough(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="give conf=<file or one of"):
        composed(None, [])
    config = composed("ppo_math", ["model.path=owner/name", f"data.val_files={tmp_path}/a.jsonl"])
    assert (config.evaluation.num_prompts, config.data.max_response_tokens) == (0, 1024)
    with pytest.raises(ConfigError, match="the greedy samples of a prompt are identical"):
        composed("ppo_math", ["model.path=owner/name", "evaluation.temperature=0"])
