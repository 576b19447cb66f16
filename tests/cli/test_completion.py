"""Completion of settings, as bash calls it."""

from __future__ import annotations

import os
import pty
import select
import sys
import time
from pathlib import Path

import pytest

from async_rl.launchers.commands.options import complete_setting


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["conf", "=", "ppo_c"], ["ppo_code"]),
        (["conf", "="], ["agent_code", "grpo_code", "grpo_code_retry", "ppo_code", "ppo_math"]),
        (["conf=ppo_c"], ["conf=ppo_code"]),
        (["conf", "=", "ppo_code", "num_st"], ["num_steps=", "num_steps=..."]),
        (["algorithm", "=", "dp"], ["dppo"]),
        (["data.shuffle", "=", "f"], ["false"]),
        (["buffer.uniform_groups", "="], ["replace", "train"]),
        (["seed", "=", "1"], []),
    ],
)
def test_settings_are_completed_where_bash_splits_words(
    monkeypatch: pytest.MonkeyPatch, words: list[str], expected: list[str]
) -> None:
    given = ["async-rl", "launch", *words]
    monkeypatch.setenv("COMP_WORDS", "\n".join(given))
    monkeypatch.setenv("COMP_CWORD", str(len(given) - 1))
    assert sorted(complete_setting(given[-1]))[: len(expected) or None] == expected


def test_other_shells_get_whole_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMP_WORDS", raising=False)
    assert complete_setting("conf=ppo_c") == ["conf=ppo_code"]
    assert complete_setting("num_st") == ["num_steps="]
    assert complete_setting("nothing") == []


def test_a_real_bash_completes_the_name_after_conf(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        os.chdir(tmp_path)
        environment = {**os.environ, "PATH": path, "PS1": "$ ", "TERM": "dumb", "COLUMNS": "500"}
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environment)

    def shown(expected: bytes) -> bool:
        text, end_s = b"", time.monotonic() + 60
        while expected not in text and time.monotonic() < end_s:
            if select.select([terminal], [], [], 1)[0]:
                text += os.read(terminal, 4096)
        return expected in text

    os.write(terminal, b'eval "$(async-rl --show-completion bash)"; echo rea""dy\r')
    assert shown(b"ready")
    os.write(terminal, b"async-rl launch conf=ppo_c\t")
    assert shown(b"conf=ppo_code ")
    os.write(terminal, b"\x15exit\r")
    os.waitpid(pid, 0)
    os.close(terminal)
