"""`async-rl` in the process of a test."""

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from async_rl.launchers import cli


class Answer(NamedTuple):
    """The exit code of a command, and what it printed."""

    code: int
    out: str
    err: str


Command = Callable[..., Answer]


def command_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs `async-rl` with its words."""

    def run(*words: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["async-rl", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert isinstance(caught.value.code, int)
        return Answer(caught.value.code, *capsys.readouterr())

    return run
