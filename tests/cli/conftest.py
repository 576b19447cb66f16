from __future__ import annotations

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


@pytest.fixture
def async_rl(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:
    """Run `async-rl` with these words in this process."""

    def run(*words: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["async-rl", *words])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert isinstance(caught.value.code, int)
        return Answer(caught.value.code, *capsys.readouterr())

    return run
