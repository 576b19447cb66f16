"""One run for all tests of this folder (resumed_run.py), and copies of it that tests may change."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from resumed_run import Resumed, resumed_run


@pytest.fixture(scope="session")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Resumed]:
    with resumed_run(tmp_path_factory.mktemp("resumed")) as found:
        yield found


@pytest.fixture
def copied(resumed: Resumed, tmp_path: Path) -> Path:
    """A copy of its directory, whose checkpoints are links: 100 MB that no test changes."""
    return Path(shutil.copytree(resumed.directory, tmp_path / "run", copy_function=_copy))


def _copy(source: str, target: str) -> None:
    if "/checkpoints/" in source:
        os.link(source, target)
    else:
        shutil.copy2(source, target)
