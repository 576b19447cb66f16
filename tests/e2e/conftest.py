"""Runs for the end-to-end tests."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from e2e_support import LiveRun, async_rl


@pytest.fixture(scope="session", autouse=True)
def warm_server() -> None:
    """Start the server of warm processes before any run: it imports for seconds, which would
    disturb what a test measures.
    """
    assert async_rl("--version").returncode == 0


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., LiveRun]]:
    """Starts runs below tmp_path and ends what is left of them."""
    started: list[LiveRun] = []

    def start(
        *settings: str, name: str = "run", resumes: bool = False, prefix: Sequence[str] = ()
    ) -> LiveRun:
        started.append(LiveRun(tmp_path, *settings, name=name, resumes=resumes, prefix=prefix))
        return started[-1]

    yield start
    for run in started:
        run.end()
