"""The memory of a vLLM engine on a CPU does not grow with the number of pushes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_pushes_leave_no_copies_of_the_model(tmp_path: Path) -> None:
    """Before freed weights were returned to the system, 12 pushes left three and a half models."""
    scenario, out = Path(__file__).with_name("memory_scenario.py"), tmp_path / "memory.json"
    done = subprocess.run(
        [sys.executable, str(scenario), str(tmp_path / "model"), str(out)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    said = json.loads(out.read_text())
    memory_mb = said["memory_mb"]
    # The second push is the first that replaces packed weights.
    assert memory_mb[-1] - memory_mb[1] < 0.7 * said["size_mb"], memory_mb
