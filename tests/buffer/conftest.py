"""The buffer's service as most of its tests need it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from buffer_support import opened

from async_rl.buffer.service import BufferService


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[BufferService]:
    """A new run with the configuration of `make_config`."""
    async with opened(tmp_path) as service:
        yield service
