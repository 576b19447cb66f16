"""The memory of a vLLM engine on a CPU does not grow with the number of pushes."""

from pathlib import Path

import pytest
from generation_support import run_scenario

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_pushes_leave_no_copies_of_the_model(tmp_path: Path) -> None:
    """Before freed weights were returned to the system, a push left a third of the model."""
    said = run_scenario("memory_scenario:main", tmp_path / "model")
    memory_mb = said["memory_mb"]
    # The second push is the first that replaces packed weights.
    assert memory_mb[-1] - memory_mb[1] < 0.7 * said["size_mb"], memory_mb
