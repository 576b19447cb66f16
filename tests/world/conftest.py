"""The directories of worlds are in memory: their stores and checkpoints are synced often."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    shared = Path("/dev/shm")
    folder = shared if shared.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="world_", dir=folder) as path:
        yield Path(path)
