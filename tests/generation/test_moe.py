"""A mixture of experts that is trained and pushed: the engine computes what the learner computes.

The learner's names are those of transformers 5 (`mlp.experts.gate_up_proj`), the checkpoint's those
of each expert, and vLLM packs experts for its kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("kind", ["vllm", "stock"])
def test_a_trained_mixture_of_experts_is_exact_in_the_engine_after_every_push(
    tmp_path: Path, kind: str
) -> None:
    out = tmp_path / "numbers.json"
    done = subprocess.run(
        [sys.executable, str(HERE / "moe_scenario.py"), kind, str(tmp_path), str(out)],
        # For benchmarks.qualification, which measures the same on a GPU.
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    numbers = json.loads(out.read_text())
    assert numbers["tokens"] > 500
    assert numbers["engine_abs_max"] < 1e-4
