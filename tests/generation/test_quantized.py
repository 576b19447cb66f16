"""An engine with quantized weights or keys and values: pushes reach it, and it differs from the
learner by no more than rounding.
"""

from __future__ import annotations

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


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["kv_cache_dtype=fp8", "quantization=fp8_per_channel"])
def test_a_quantized_engine_rounds_the_weights_of_each_push(tmp_path: Path, entry: str) -> None:
    out = tmp_path / "scores.json"
    said: Any = run_scenario("quantized_scenario.py", entry, tmp_path / "model", out=out)
    model = model_from(tmp_path / "model")
    own = [scores_of(model_of(model, version)) for version in (0, 1)]
    for version, rows in enumerate(said):
        difference = np.abs(np.array(rows)[:, 1:] - own[version])
        of_push = np.abs(own[1] - own[0]).mean()
        assert difference.max() > EXACT
        assert difference.mean() < 0.25 * of_push
