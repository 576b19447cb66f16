"""Engines with quantized weights, with quantized keys and values, or with a float32 head: pushes
reach them, they differ from the learner by no more than rounding, and only a head of float32 has
unrounded logits.
"""

from pathlib import Path

import numpy as np
import pytest
from generation_support import QUANTIZED_ROWS, model_from, model_of, replay, run_scenario

# vLLM's cache of fp8 on a CPU needs AVX-512.
HAS_FP8 = "avx512f" in Path("/proc/cpuinfo").read_text()
HEAD = ["generation.head_dtype=float32"]
ENGINES = {
    "weights": ["generation.vllm.extra=['quantization=fp8_per_channel']"],
    "head": [*HEAD, *["generation.vllm.extra=['kv_cache_dtype=fp8']"] * HAS_FP8],
    "hf_head": [*HEAD, "generation.engine=hf"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_of_fewer_bits_rounds_the_weights_of_each_push(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model"
    said, likeliest = run_scenario("quantized_scenario:main", ENGINES[name], path)
    model = model_from(path)
    own = [
        np.stack(
            [
                replay({version: model_of(model, version)}, first, rest, [version] * len(rest), 1.0)
                for first, rest in ((row[:1], row[1:]) for row in QUANTIZED_ROWS)
            ]
        )
        for version in (0, 1)
    ]
    of_push = np.abs(own[1] - own[0]).mean()
    for version, scores in enumerate(said):
        difference = np.abs(scores[:, 1:] - own[version])
        assert difference.max() > 1e-4
        assert difference.mean() < 0.25 * of_push
    # Logits of bfloat16 above 1 are multiples of 1 / 128.
    gaps = 128 * np.diff(likeliest, axis=1)
    is_rounded = np.abs(gaps - gaps.round()) < 0.01
    assert is_rounded.all() if name == "weights" else is_rounded.mean() < 0.2
