"""Facts about finding runs on disk and telling what became of them."""

import json
import os
from pathlib import Path

import pytest
from tables import table

from async_rl.composition.compose import compose, write_config
from async_rl.core.errors import ConfigError
from async_rl.launchers.commands.models import composed, export_model, run_of
from async_rl.runs.directory import all_runs, find_run
from async_rl.runs.status import RunState, status_of
from async_rl.training.checkpoints import directory_of


def make_run(output_dir: Path, name: str, *, age_s: int = 0) -> Path:
    run_dir = output_dir / name
    run_dir.mkdir(parents=True)
    write_config(compose("ppo_code", [f"run_name={name}", "num_steps=9"]), run_dir / "config.yaml")
    stamp = 1_800_000_000 - age_s
    os.utime(run_dir / "config.yaml", (stamp, stamp))
    return run_dir


@pytest.mark.covers("experiment_name")
def test_a_run_is_found_by_name_and_by_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run(tmp_path / "runs", "mine")
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "runs/mine", str(run_dir)):
        assert find_run(name, tmp_path / "runs") == run_dir


@pytest.mark.parametrize(("text", "told"), table(__file__, "a_configuration_that_cannot_be"))
def test_a_configuration_that_cannot_be_read_is_told_with_the_remedy(
    tmp_path: Path, text: str | None, told: str
) -> None:
    file = make_run(tmp_path, "mine") / "config.yaml"
    if text is None:
        text = file.read_text().replace("num_steps:", "num_epochs:")
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"config\.yaml {told}"):
        status_of(file.parent)


def test_a_run_that_is_not_there_is_told_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run exists in"):
        find_run(None, tmp_path)
    make_run(tmp_path, "amber-otter")
    for name, expected in (("amber-oter", "did you mean amber-otter"), ("x", "there are amber-o")):
        with pytest.raises(ConfigError, match=expected):
            find_run(name, tmp_path)


def test_the_remains_of_a_run_tell_its_last_whole_row_or_its_cause(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "mine")
    status = status_of(run_dir)
    assert (status.step, status.num_steps, status.state) == (0, 9, RunState.KILLED)
    row = '{"step": 4, "reward/mean": 0.75}\n'
    (run_dir / "metrics.jsonl").write_text(row + '{"step": 5, "rew')
    assert (status_of(run_dir).step, status_of(run_dir).metrics["reward/mean"]) == (4, 0.75)
    ended = {"outcome": "failed", "step": 2, "cause": "no memory", "ended_s": 1.0}
    (run_dir / "state.json").write_text(json.dumps(ended))
    status = status_of(run_dir)
    assert (status.state, status.cause) == (RunState.FAILED, "no memory")


def test_the_newest_run_that_trained_is_meant_by_default(tmp_path: Path) -> None:
    old, new = make_run(tmp_path, "old", age_s=60), make_run(tmp_path, "new")
    (tmp_path / "no-run").mkdir()
    assert all_runs(tmp_path) == [new, old]
    assert find_run(None, tmp_path) == new
    for run_dir in (old, new):
        (run_dir / "state.json").write_text('{"outcome": "failed", "cause": "no disk"}')
    assert find_run(None, tmp_path) == new, "no other run can be meant"
    (old / "metrics.jsonl").write_text('{"step": 1}\n')
    assert find_run(None, tmp_path) == old
    assert find_run("new", tmp_path) == new


def test_a_run_a_checkpoint_and_a_model_are_told_apart(tmp_path: Path) -> None:
    output_dir = tmp_path / "runs"
    run_dir = make_run(output_dir, "mine")
    for step in (2, 4):
        directory_of(run_dir, step).mkdir(parents=True)
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
