from pathlib import Path

import pytest
from view_support import make_run


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs, `one` and `two`, and a directory that is no run."""
    directory = tmp_path_factory.mktemp("runs")
    for name, reward in (("one", 0.8), ("two", 0.4)):
        make_run(directory / name, reward=reward)
    (directory / "notes").mkdir()
    return directory
