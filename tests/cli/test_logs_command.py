"""Facts about `async-rl logs`."""

from pathlib import Path
from typing import Any

import pytest

from async_rl.composition.compose import compose, write_config
from async_rl.launchers.commands import live as logs_command


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    logs = tmp_path / "mine" / "logs"
    logs.mkdir(parents=True)
    write_config(compose("ppo_code", ["run_name=mine"]), tmp_path / "mine" / "config.yaml")
    stamp = "2026-11-20 19:30:0"
    (logs / "buffer.log").write_text(
        f"{stamp}1.000 INFO    buffer  one\n{stamp}4.000 INFO    buffer  four\n"
    )
    (logs / "learner-0.log").write_text(
        "2026-11-20 19:30:02.000 ERROR   learner-0  two\n    Traceback\n    ValueError: 2\n"
        "2026-11-20 19:30:03.000 INFO    learner-0  three\n"
    )
    (logs / "tensorboard.log").write_text("NOTE: zero\n")
    (logs / "learner-0.out").write_text("from a library\n")
    return tmp_path / "mine"


def last_words(text: str) -> list[str]:
    return [line.split()[-1] for line in text.splitlines()]


def test_entries_of_all_processes_are_in_order_of_time_and_tracebacks_stay_whole(
    run_dir: Path, async_rl: Any
) -> None:
    words = ["zero", "one", "two", "Traceback", "2", "three", "four"]
    assert last_words(async_rl("logs", str(run_dir)).out) == words
    # A traceback counts as one entry with its head.
    assert last_words(async_rl("logs", str(run_dir), "--num", "3").out) == words[2:]
    assert async_rl("logs", str(run_dir), "--num", "0").out == ""


def test_following_shows_what_is_added_whole_and_ends_with_the_run(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, async_rl: Any
) -> None:
    log = run_dir / "logs" / "buffer.log"
    five = "2026-11-20 19:30:05.000 INFO    buffer  five\n2026-11-20 19:30:06."
    added = iter([five, "000 INFO    buffer  six\n", None])

    def living_pid(_: Path) -> int | None:
        text = next(added)
        if text is None:
            return None
        with log.open("a") as file:
            file.write(text)
        return 7

    monkeypatch.setattr(logs_command, "living_pid", living_pid)
    monkeypatch.setattr(logs_command, "POLL_S", 0.0)
    out = async_rl("logs", str(run_dir), "--follow", "--num", "0").out
    assert last_words(out) == ["five", "six"]
