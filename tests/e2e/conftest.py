"""Runs for the end-to-end tests."""

import pytest
from e2e_support import async_rl


@pytest.fixture(scope="session", autouse=True)
def warm_server() -> None:
    """Start the server of warm processes before any run: it imports for seconds, which would
    disturb what a test measures.
    """
    assert async_rl("--version").returncode == 0
