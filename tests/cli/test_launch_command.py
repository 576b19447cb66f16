"""Facts about `async-rl launch`: what it shows, what it refuses, what it makes, how little it
imports.
"""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tables import table
from unread_output import run_unread

from async_rl.composition.compose import compose
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.launchers.api import starting
from async_rl.launchers.commands import launch as launch_command
from async_rl.runtime.context import load_config


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "async_rl.launchers.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Return the run that `launch` would supervise, without starting it."""
    configs: list[RunConfig] = []

    def supervise(config: RunConfig, run_dir: Path) -> int:
        assert load_config(run_dir) == config
        configs.append(config)
        return 0

    monkeypatch.setattr(launch_command, "supervise", supervise)
    return configs


def test_dry_run_shows_configuration_processes_and_numbers_and_makes_nothing(
    tmp_path: Path,
) -> None:
    done = run(
        "launch",
        "conf=ppo_code",
        "--dry-run",
        f"output_dir={tmp_path}/runs",
        "generators.count=2",
        "generators.pools={big:{count:1,work:train,max_num_seqs:64},judge:{count:1,work:evaluation}}",
        "run_name=mine",
    )
    assert (done.returncode, done.stderr) == (0, "")
    for expected in (
        "run_name: mine",
        "groups_per_step: 16",
        "generator-1",
        "generator-big-0",
        "generator-judge-0",
        "staleness bound",
        "48 groups in flight",
    ):
        assert expected in done.stdout
    assert "memory estimate" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_resolved_configuration_in_a_dry_run_is_valid_yaml(
    tmp_path: Path, async_rl: Any
) -> None:
    words = ["conf=grpo_code", f"output_dir={tmp_path}", "run_name=007", "--dry-run"]
    shown = async_rl("launch", *words).out
    text = shown.partition("configuration\n")[2].partition("\nprocesses")[0]
    assert RunConfig.model_validate(msgspec.yaml.decode(text)).run_name == "007"


@pytest.mark.parametrize(("arguments", "expected"), table(__file__, "wrong"))
def test_wrong_settings_exit_with_two_and_make_nothing(
    tmp_path: Path, async_rl: Any, arguments: list[str], expected: str
) -> None:
    words = [*arguments, f"output_dir={tmp_path}/runs"] if arguments else []
    code, _, err = async_rl("launch", *words)
    assert code == 2
    assert expected in err
    assert list(tmp_path.iterdir()) == []


def test_an_error_is_printed_without_a_traceback(tmp_path: Path) -> None:
    done = run("launch", "conf=ppo_code", "num_steps=0", f"output_dir={tmp_path}/runs")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: num_steps=0: must be greater than or equal to 1")
    assert done.stderr.count("\n") == 1


def test_each_launch_makes_a_directory_of_its_own_and_hands_over(
    tmp_path: Path, started: list[RunConfig], async_rl: Any
) -> None:
    for _ in range(2):
        launched = async_rl("launch", "conf=ppo_code", f"output_dir={tmp_path}", "num_steps=3")
        assert launched.code == 0
    assert [config.num_steps for config in started] == [3, 3]
    names = {config.run_name for config in started}
    assert len(names) == 2
    assert {path.name for path in tmp_path.iterdir()} == names


def test_the_exit_code_of_the_run_is_that_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_rl: Any
) -> None:
    monkeypatch.setattr(launch_command, "supervise", lambda *_: 1)
    assert async_rl("launch", "conf=ppo_code", f"output_dir={tmp_path}").code == 1


HEAVY = ("torch", "vllm", "transformers", "ray", "zmq", "pyarrow", "tensorboard", "tokenizers")


@pytest.mark.parametrize("arguments", [["--help"], ["launch", "conf=ppo_code", "--dry-run"]])
def test_help_and_dry_run_import_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    code = f"""
import sys
from async_rl.launchers import cli
from async_rl.launchers.commands import launch as launch_command
sys.argv = ["async-rl", *{arguments!r}]
try:
    cli.main()
except SystemExit as exit:
    assert exit.code in (0, None), exit.code
loaded = sorted(set({HEAVY!r}) & set(sys.modules))
assert not loaded, loaded
"""
    started_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    # Half a second on a quiet machine; the bound leaves room for a busy one.
    assert time.monotonic() - started_s < 10


def test_a_plan_that_nobody_reads_does_not_keep_the_run_from_starting(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from async_rl.launchers.commands import launch\n"
        "launch.supervise = lambda config, run_dir: 7\n"
        "sys.stdin.readline()\n"
        f"launch.launch(['conf=grpo_code', 'output_dir={tmp_path}', 'run_name=mine'])\n"
    )
    code, errors = run_unread(program)
    assert b"Exit: 7" in errors or code == 7, errors
    assert (tmp_path / "mine" / "config.yaml").is_file()


def test_a_model_that_the_hub_does_not_give_makes_no_run_directory(tmp_path: Path) -> None:
    words = [f"output_dir={tmp_path}/runs", "run_name=mine", "model.path=owner/no-such-model"]
    with pytest.raises(ConfigError, match="not in the local hub cache, and cannot be downloaded"):
        starting.make_run_dir(compose("grpo_code", words))
    assert list(tmp_path.iterdir()) == []


def test_only_its_owner_reads_a_run(tmp_path: Path) -> None:
    config = compose("grpo_code", [f"output_dir={tmp_path}", "run_name=mine"])
    run_dir = starting.make_run_dir(config)
    assert run_dir.stat().st_mode & 0o777 == 0o700
