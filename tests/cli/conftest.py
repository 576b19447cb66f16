"""A command in the process of a test."""

import pytest
from command_line import Command, command_of


@pytest.fixture
def async_rl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run `async-rl` with these words in this process."""
    return command_of(monkeypatch, capsys)
