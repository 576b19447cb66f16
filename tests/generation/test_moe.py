"""A mixture of experts that is trained and pushed: the engine computes what the learner computes.

The learner's names are those of transformers 5 (`mlp.experts.gate_up_proj`), the checkpoint's those
of each expert, and vLLM packs experts for its kernels.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from generation_support import run_scenario

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("kind", ["vllm", "stock"])
def test_a_trained_mixture_of_experts_is_exact_in_the_engine_after_every_push(
    tmp_path: Path, kind: str
) -> None:
    # benchmarks.qualification measures the same on a GPU.
    numbers = run_scenario("moe_scenario.py", kind, tmp_path, out=tmp_path / "numbers.json")
    assert numbers["tokens"] > 500
    assert numbers["engine_abs_max"] < 1e-4
