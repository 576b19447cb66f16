"""The trainer computes and trains models of other makers (families: test_families.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from learner_support import make_groups, make_trainer
from tables import table
from transformers import AutoModelForCausalLM

SIZES = table(__file__, "sizes")


def save(path: Path, kind: str, **settings: Any) -> Path:
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **settings})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize(("kind", "settings"), table(__file__, "packed_rows_give_the_models"))
def test_packed_rows_give_the_models_own_logprobs_and_it_learns(
    tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    path = save(tmp_path / "model", kind, **settings)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    trainer = make_trainer(path, "grpo_code")
    rng = np.random.default_rng(0)
    rows = [rng.integers(2, 50, length).astype(np.int32) for length in (5, 17, 23)]
    for row, found in zip(rows, trainer.logprobs(rows), strict=True):
        ids = torch.from_numpy(row.astype(np.int64))[None]
        expected = (
            torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None]).squeeze(1)
        )
        np.testing.assert_allclose(found[1:], expected.detach(), atol=1e-4)
    assert trainer.step(make_groups(), 0).scalars["policy/grad_norm"] > 0
