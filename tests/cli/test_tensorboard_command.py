"""`async-rl tensorboard`: several runs under their names, and an orderly end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from async_rl.core.errors import ConfigError
from async_rl.launchers.commands.tensorboard import tensorboard
from async_rl.monitoring.event_file import EventFile


def make_run(run_dir: Path) -> None:
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text("{}")
    events = EventFile(run_dir / "tensorboard")
    events.scalar("reward/mean", 0.5, 1)
    events.close()


def names_shown(url: str, num_runs: int) -> list[str]:
    """The runs of a TensorBoard that is just starting, once it has read so many."""
    deadline_s = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"{url}data/runs", timeout=10) as reply:
                names: list[str] = json.load(reply)
        except OSError:
            names = []
        if len(names) >= num_runs or time.monotonic() > deadline_s:
            return sorted(names)
        time.sleep(0.2)


@pytest.mark.slow
def test_runs_have_their_names_and_nothing_stays(tmp_path: Path) -> None:
    make_run(tmp_path / "one")
    make_run(tmp_path / "two")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "async_rl.launchers.cli", "tensorboard", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    assert "two" in first.split(" at ")[0]
    found = re.search(r"http://[^#]+", first)
    assert found is not None
    assert names_shown(found[0], 2) == ["one", "two"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    process.stdout.close()
    assert list(scratch.glob("async-rl-tensorboard-*")) == []


def test_two_runs_of_one_name_are_refused(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        make_run(tmp_path / folder / "mine")
    with pytest.raises(ConfigError, match="mine is the name of 2 chosen runs; choose one"):
        tensorboard([str(tmp_path / "a" / "mine"), str(tmp_path / "b" / "mine")])


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no run"):
        tensorboard([], output_dir=tmp_path)
