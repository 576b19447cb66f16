from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from data_support import make_config, make_tokenizer

from async_rl.config.run import RunConfig


@pytest.fixture
def small_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A configuration whose models are cached in a directory of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return make_config()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()
