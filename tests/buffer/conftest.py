"""The buffer's service as most of its tests need it, and a command about a run."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from buffer_support import opened
from command_line import Command, command_of

from async_rl.buffer.service import BufferService


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[BufferService]:
    """A new run with the configuration of `make_config`."""
    async with opened(tmp_path) as service:
        yield service


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs `async-rl` with these words."""
    return command_of(monkeypatch, capsys)
