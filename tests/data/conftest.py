from __future__ import annotations

from pathlib import Path

import pytest
from data_support import make_config

from async_rl.config.run import RunConfig


@pytest.fixture
def small_config(tmp_path: Path) -> RunConfig:
    """A configuration whose models are cached in a directory of the test."""
    return make_config(f"cache_dir={tmp_path / 'cache'}")
