"""Facts about `async-rl logs`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from async_rl.composition.compose import compose, write_config
from async_rl.launchers import cli
from async_rl.launchers.commands import logs as logs_command


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    logs = tmp_path / "mine" / "logs"
    logs.mkdir(parents=True)
    write_config(compose("ppo_code", ["run_name=mine"]), tmp_path / "mine" / "config.yaml")
    (logs / "buffer.log").write_text(
        "2026-11-20 19:30:01.000 INFO    buffer  one\n2026-11-20 19:30:04.000 INFO    buffer "
        " four\n"
    )
    (logs / "learner-0.log").write_text(
        "2026-11-20 19:30:02.000 ERROR   learner-0  two\n    Traceback\n    ValueError: 2\n"
        "2026-11-20 19:30:03.000 INFO    learner-0  three\n"
    )
    (logs / "tensorboard.log").write_text("NOTE: zero\n")
    (logs / "learner-0.out").write_text("from a library\n")
    return tmp_path / "mine"


def shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["async-rl", "logs", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, out, err


def test_entries_of_all_processes_are_in_order_of_time_and_tracebacks_stay_whole(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = shown(monkeypatch, capsys, str(run_dir))
    assert [line.split()[-1] for line in out.splitlines()] == [
        "zero",
        "one",
        "two",
        "Traceback",
        "2",
        "three",
        "four",
    ]


def test_the_newest_entries_are_shown_and_a_traceback_counts_as_one_with_its_head(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = shown(monkeypatch, capsys, str(run_dir), "--num", "3")
    assert [line.split()[-1] for line in out.splitlines()] == [
        "two",
        "Traceback",
        "2",
        "three",
        "four",
    ]
    assert shown(monkeypatch, capsys, str(run_dir), "--num", "0")[1] == ""


def test_one_process_and_what_its_libraries_printed(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(monkeypatch, capsys, str(run_dir), "buffer")[1].count("\n") == 2
    assert (
        shown(monkeypatch, capsys, str(run_dir), "learner-0", "--output")[1] == "from a library\n"
    )


def test_a_process_that_is_not_there_is_told_with_the_nearest(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = shown(monkeypatch, capsys, str(run_dir), "lerner-0")
    assert code == 2
    assert "did you mean learner-0?" in err


def test_following_shows_what_is_added_whole_and_ends_with_the_run(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = run_dir / "logs" / "buffer.log"
    added = iter(
        [
            "2026-11-20 19:30:05.000 INFO    buffer  five\n2026-11-20 19:30:06.",
            "000 INFO    buffer  six\n",
            None,
        ]
    )

    def living_pid(_: Path) -> int | None:
        text = next(added)
        if text is None:
            return None
        with log.open("a") as file:
            file.write(text)
        return 7

    monkeypatch.setattr(logs_command, "living_pid", living_pid)
    monkeypatch.setattr(logs_command, "_POLL_S", 0.0)
    _, out, _ = shown(monkeypatch, capsys, str(run_dir), "--follow", "--num", "0")
    assert [line.split()[-1] for line in out.splitlines()] == ["five", "six"]
