"""An engine with quantized weights or keys and values, or with bfloat16 and a float32 head: pushes
reach it, it differs from the learner by no more than rounding, and only the last has unrounded
logits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generation_support import QUANTIZED_ROWS, model_from, model_of, run_scenario

EXACT = 1e-4


@torch.no_grad()
def scores_of(model: Any) -> Any:
    ids = torch.tensor(QUANTIZED_ROWS)
    table = model(ids).logits[:, :-1].log_softmax(-1)
    return table.gather(-1, ids[:, 1:, None])[..., 0].numpy()


ENGINES = {
    "cache": ["generation.vllm.extra=['kv_cache_dtype=fp8']"],
    "weights": ["generation.vllm.extra=['quantization=fp8_per_channel']", "model.dtype=bfloat16"],
    "vllm_head": ["generation.head_dtype=float32", "model.dtype=bfloat16"],
    "hf_head": ["generation.head_dtype=float32", "model.dtype=bfloat16", "generation.engine=hf"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_of_fewer_bits_rounds_the_weights_of_each_push(tmp_path: Path, name: str) -> None:
    if name == "cache" and "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("vLLM's cache of fp8 on a CPU needs AVX-512")
    settings = json.dumps(ENGINES[name])
    out = tmp_path / "scores.json"
    *said, likeliest = run_scenario("quantized_scenario.py", settings, tmp_path / "model", out=out)
    model = model_from(tmp_path / "model")
    own = [scores_of(model_of(model, version)) for version in (0, 1)]
    for version, rows in enumerate(said):
        difference = np.abs(np.array(rows)[:, 1:] - own[version])
        of_push = np.abs(own[1] - own[0]).mean()
        assert difference.max() > EXACT
        assert difference.mean() < 0.25 * of_push
    # Logits of bfloat16 above 1 are multiples of 1 / 128.
    gaps = 128 * np.diff(np.array(likeliest), axis=1)
    is_rounded = np.abs(gaps - gaps.round()) < 0.01
    assert is_rounded.all() if name == "weights" else is_rounded.mean() < 0.2
