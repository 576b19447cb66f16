"""Wrong inputs as a person gives them: a clear line, exit code 2, and nothing started or left
behind.
"""

import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from e2e_support import LiveRun, async_rl
from empty_model import write_model

pytestmark = pytest.mark.slow

Launch = Callable[..., LiveRun]


def refused(output_dir: Path, *settings: str) -> str:
    done = async_rl("launch", *settings, f"output_dir={output_dir}", "run_name=run")
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    assert "Traceback" not in said
    assert not (output_dir / "run").exists()
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert [words for words in commands if str(output_dir) in " ".join(words)] == []
    return said


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("learner.optimizer.lrr=1", "did you mean learner.optimizer.lr"),
        ("num_steps=many", "num_steps=many"),
        ("generation.temperature=-1", "generation.temperature=-1"),
        ("buffer.groups_per_step=3", "learner.minibatches=2"),
        ("model.path=/nowhere/model", "model.path=/nowhere/model: there is no such directory"),
        ("network.host=203.0.113.7", "not an address of this machine"),
    ],
)
def test_a_wrong_setting_is_answered_before_anything_starts(
    tmp_path: Path, setting: str, expected: str
) -> None:
    assert expected in refused(tmp_path, "conf=ppo_code", setting)


def test_a_data_file_that_cannot_be_read_names_the_file(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    said = refused(
        tmp_path,
        "conf=ppo_code",
        f"model.path={model}",
        f"data.train_files={tmp_path}/none.jsonl",
        "evaluation.every_steps=0",
    )
    assert f"data.train_files: {tmp_path}/none.jsonl: there is no such file" in said


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"monitoring.tensorboard_port={port}: cannot be used" in refused(
            tmp_path, "conf=ppo_code", f"monitoring.tensorboard_port={port}"
        )


def test_a_broken_row_of_the_data_ends_the_run_with_file_and_row(
    launch: Launch, tmp_path: Path
) -> None:
    data = tmp_path / "rows.jsonl"
    # The first rows are read before anything starts (tests/config/test_first_rows.py).
    good = '{"prompt": "add", "test_list": ["assert f(1) == 2"]}\n'
    data.write_text(20 * good + '{"prompt": 5}\n')
    lengths = ("data.max_prompt_tokens=64", "data.max_response_tokens=64")
    run = launch(
        "conf=grpo_code",
        f"model.path={cached_model()}",
        f"data.train_files={data}",
        "evaluation.every_steps=0",
        *lengths,
    )
    assert run.wait(timeout_s=120) == 1
    assert "rows.jsonl, row 21" in run.terminal, run.terminal
    assert run.processes() == []


def cached_model() -> Path:
    """The embedded model as a model of one's own; made if no test before did so."""
    from async_rl.composition.compose import compose
    from async_rl.data.prepare import prepare_model

    return prepare_model(compose("grpo_code", []), lambda *_: None)
