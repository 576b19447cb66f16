"""Every line of the session in docs/python.md runs."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

import async_rl

TUTORIAL = Path(__file__).resolve().parents[2] / "docs/python.md"


@pytest.mark.slow
def test_the_tutorial_runs_from_start_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    try:
        for block in re.findall(r"^```python\n(.*?)^```", TUTORIAL.read_text(), re.M | re.S):
            exec(block, names)
    finally:
        with contextlib.suppress(async_rl.ConfigError):
            async_rl.open_run("runs/from-python").stop(now=True)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("num_step=20: there is no such setting; did you mean num_steps")
    assert shown[1].startswith("0 None") or shown[1].startswith("1 ")
    assert any(line.startswith("running ") for line in shown)
    assert "stopped" in shown
    assert shown[-3:] == ["wrong_answer", "pass ", "wrong_answer f(2) returned 4, not 5"]
