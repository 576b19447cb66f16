"""The buffer's service as most of its tests need it, and a command about a run."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from buffer_support import Command, Shown, opened

from async_rl.buffer.service import BufferService
from async_rl.launchers import cli


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[BufferService]:
    """A new run with the configuration of `make_config`."""
    async with opened(tmp_path) as service:
        yield service


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs `async-rl` with these words."""

    def run(*words: object) -> Shown:
        monkeypatch.setattr(sys, "argv", ["async-rl", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert isinstance(caught.value.code, int)
        return Shown(caught.value.code, *capsys.readouterr())

    return run
