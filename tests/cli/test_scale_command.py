"""What `async-rl scale` refuses, before the run hears of it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from async_rl.errors import ConfigError
from async_rl.launchers.cli import app
from async_rl.launchers.compose import compose, write_config
from async_rl.machine import Machine
from async_rl.processes.scaling import check_counts, last_asked


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["generators"], "nothing to change"),
        (["one", "two", "generators=2"], "two: give one run"),
        (["generators=two"], "generators=two: give a whole number"),
        (["generators=-1"], "generators=-1: give a whole number"),
    ],
)
def test_words_that_make_no_sense_are_refused_with_the_remedy(words: list[str], answer: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["scale", *words, "--output-dir", str(tmp_path)])
    assert isinstance(result.exception, ConfigError)
    assert answer in str(result.exception)


def test_a_run_that_is_not_running_cannot_be_scaled(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    write_config(compose("grpo_code", ["run_name=mine"]), tmp_path / "mine" / "config.yaml")
    result = CliRunner().invoke(app, ["scale", "mine", "generators=2", "--output-dir", str(tmp_path)])
    assert "only a live run can be scaled" in str(result.exception)


@pytest.mark.parametrize(
    ("counts", "answer"),
    [
        ({"generator": 2}, "did you mean generators?"),
        ({"verifiers": 0}, "verifiers=0: must be at least 1"),
        ({"generators": 3}, "need 4 GPUs, this machine has 3"),
    ],
)
def test_numbers_that_cannot_be_are_refused(counts: dict[str, int], answer: str) -> None:
    config = compose(
        "grpo_code",
        ["generators.gpus_each=1", "learner.gpus_each=1", *(f"{part}.cores=[]" for part in ("generators", "verifiers", "learner"))],
    )
    machine = Machine(cores=tuple(range(8)), num_gpus=3, memory_mb=100_000)
    check_counts(config, {"generators": 2}, machine)
    with pytest.raises(ConfigError, match=answer.replace("?", r"\?")):
        check_counts(config, counts, machine)


def test_what_was_asked_last_is_found_again_and_a_broken_file_is_told(tmp_path: Path) -> None:
    assert last_asked(tmp_path) == {}
    (tmp_path / "scale.json").write_text('{"generators": 3}')
    assert last_asked(tmp_path) == {"generators": 3}
    (tmp_path / "scale.json").write_text("{")
    with pytest.raises(ConfigError, match="remove it to go on as configured"):
        last_asked(tmp_path)
