"""The runs that `async-rl resume` accepts and refuses before anything starts."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from tables import table

from async_rl.composition import schema
from async_rl.composition.compose import compose, write_config
from async_rl.config.base import replace
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.launchers.api.resuming import FIXED, is_copy, reopen, resumed_config
from async_rl.learner.optimizer import learning_rate
from async_rl.runs.control import leave_mark, living_pid
from async_rl.runs.status import config_of
from async_rl.training.checkpoints import directory_of


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "mine"
    directory.mkdir()
    write_config(compose("grpo_code", ["run_name=mine", "num_steps=9"]), directory / "config.yaml")
    for name in ("store.sqlite", "metrics.jsonl"):
        (directory / name).touch()
    return directory


def test_changes_are_told_with_both_values_and_nothing_else_is(run_dir: Path) -> None:
    words = ["num_steps=20", "learner.optimizer.lr=1e-4", "checkpoint.keep=2"]
    config, changed = resumed_config(run_dir, words)
    before = config_of(run_dir)
    assert (config.num_steps, config.learner.optimizer.lr) == (20, 1e-4)
    lr = f"learner.optimizer.lr=0.0001 (was {before.learner.optimizer.lr})"
    assert sorted(changed) == [lr, "num_steps=20 (was 9)"]
    assert resumed_config(run_dir, []) == (before, [])
    allowed = "buffer.max_staleness_versions=4 (was 2)", "algorithm.advantage=rloo (was grpo)"
    words = [line.split()[0] for line in allowed]
    assert sorted(resumed_config(run_dir, words)[1]) == sorted(allowed)
    known = schema.settings().keys() | schema.sections()
    assert set(FIXED) - known == set()
    leave_mark(run_dir)
    with pytest.raises(ConfigError, match="run mine is running"):
        resumed_config(run_dir, [])


@pytest.mark.parametrize(("setting", "expected"), table(__file__, "refused"))
def test_what_the_history_does_not_allow_is_refused_with_the_reason(
    run_dir: Path, setting: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resumed_config(run_dir, setting.split())
    assert expected in str(caught.value)


@pytest.mark.parametrize("outcome", ["", "stopped", "finished"])
def test_a_run_is_resumed_to_complete_its_last_step_or_for_more_steps(
    run_dir: Path, outcome: str
) -> None:
    directory_of(run_dir, 9).mkdir(parents=True)
    if outcome:
        (run_dir / "state.json").write_text(f'{{"outcome": "{outcome}"}}')
    wrong = 9 if outcome == "finished" else 8
    said = f"num_steps={wrong}: the run has finished step 9; give a larger num_step"
    with pytest.raises(ConfigError, match=said):
        resumed_config(run_dir, [f"num_steps={wrong}"])
    assert resumed_config(run_dir, [f"num_steps={wrong + 1}"])[0].num_steps == wrong + 1


@pytest.mark.parametrize("name", ["store.sqlite", "metrics.jsonl"])
def test_a_record_that_is_gone_is_not_silently_made_again(run_dir: Path, name: str) -> None:
    (run_dir / name).unlink()
    assert resumed_config(run_dir, [])[0].num_steps == 9  # nothing had been recorded yet
    directory_of(run_dir, 6).mkdir(parents=True)
    said = f"{run_dir / name} of the steps up to 6 is missing: restore it from a copy"
    with pytest.raises(ConfigError, match=re.escape(said)):
        resumed_config(run_dir, [])
    (run_dir / name).touch()
    assert resumed_config(run_dir, [])[0].num_steps == 9


def test_taking_up_a_run_keeps_the_configuration_of_before(run_dir: Path) -> None:
    (run_dir / "state.json").write_text("{}")
    before = (run_dir / "config.yaml").read_text()
    for number, steps in enumerate((20, 30), start=1):
        config, _ = resumed_config(run_dir, [f"num_steps={steps}"])
        (run_dir / "launched.json").unlink(missing_ok=True)
        reopen(config, run_dir)
        assert config_of(run_dir).num_steps == steps
        assert (run_dir / f"config.{number}.yaml").is_file()
        assert living_pid(run_dir) is not None
        (run_dir / "launched.json").unlink()
    assert (run_dir / "config.1.yaml").read_text() == before
    assert not (run_dir / "state.json").exists()
    (run_dir / "config.yaml.partial").mkdir()
    with pytest.raises(ConfigError, match=r"mine cannot be written .*free disk space or"):
        reopen(resumed_config(run_dir, ["num_steps=40"])[0], run_dir)
    assert config_of(run_dir).num_steps == 30


def test_a_url_or_a_directory_of_copies_is_no_run(tmp_path: Path, run_dir: Path) -> None:
    copy = tmp_path / "copies"
    copy.mkdir()
    (copy / "step_000005.complete").touch()
    places = [str(run_dir), "mine", str(copy), "s3://bucket/mine"]
    assert [is_copy(place) for place in places] == [False, False, True, True]


def _rates(config: RunConfig, steps: Sequence[int]) -> list[float]:
    optimizer = replace(config.learner.optimizer, lr=1.0, min_lr_ratio=0.0)
    return [learning_rate(step, optimizer, num_steps=config.num_steps) for step in steps]


def test_more_steps_do_not_raise_the_learning_rate_of_a_cosine_schedule(tmp_path: Path) -> None:
    words = ["run_name=a", "num_steps=8", "learner.optimizer.schedule=cosine"]
    config = compose("ppo_code", [*words, "learner.optimizer.warmup_steps=0"])
    write_config(config, tmp_path / "config.yaml")
    for name in ("store.sqlite", "metrics.jsonl"):
        (tmp_path / name).touch()
    directory_of(tmp_path, 4).mkdir(parents=True)
    before = _rates(config, range(8))
    # cos(pi / 2) half of the way: 0.5 at step 4.
    assert before[4] == pytest.approx(0.5)
    kept, lines = resumed_config(tmp_path, ["num_steps=16"])
    assert _rates(kept, range(8)) == before
    assert _rates(kept, [8, 12, 16]) == pytest.approx([0, 0, 0])
    assert "learner.optimizer.schedule_span=[0,8] (was [])" in lines
    assert "at its least value from step 8 on" in lines[-1]
    own = ["num_steps=16", "learner.optimizer.schedule_span=[0,16]"]
    assert _rates(resumed_config(tmp_path, own)[0], [8]) == pytest.approx([0.5])
