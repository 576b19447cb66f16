"""An exported policy is what transformers and vLLM load, each by itself, and both say of tokens
what the learner says.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_support import make_groups, make_model, make_trainer
from transformers import AutoModelForCausalLM

ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8], list(range(40))]


def said_by_transformers(path: Path) -> list[np.ndarray]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    for row in ROWS:
        with torch.no_grad():
            logprobs = torch.log_softmax(model(torch.tensor([row])).logits[0], -1)
        found.append(np.array([0.0] + [float(logprobs[t - 1, row[t]]) for t in range(1, len(row))]))
    return found


def said_by_vllm(path: Path) -> list[np.ndarray]:
    out = path.with_name("said.json")
    command = [
        sys.executable,
        str(Path(__file__).with_name("vllm_scores.py")),
        str(path),
        json.dumps(ROWS),
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return [np.array(row) for row in json.loads(out.read_text())]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("conf", "knobs"),
    [
        ("grpo_code", ()),
        ("ppo_code", ("algorithm.advantage.critic=shared",)),
        ("grpo_code", ("model.lora=lora", "model.lora.rank=8", "model.lora.alpha=64")),
    ],
)
def test_transformers_and_vllm_load_the_export_and_agree_with_the_learner(
    tmp_path: Path, conf: str, knobs: tuple[str, ...]
) -> None:
    start = make_model(tmp_path / "start", hidden=128, scale=2.0)
    trainer = make_trainer(start, conf, "learner.optimizer.lr=1e-2", *knobs)
    trainer.step(make_groups(), 0)
    trainer.export_hf(tmp_path / "hf")
    expected = trainer.logprobs([np.array(row, dtype=np.int32) for row in ROWS])
    before = make_trainer(start, "grpo_code").logprobs(
        [np.array(row, dtype=np.int32) for row in ROWS]
    )
    assert max(float(np.abs(a - b).max()) for a, b in zip(expected, before, strict=True)) > 0.1, (
        "the export is not the start"
    )
    for said in (
        said_by_transformers(tmp_path / "hf"),
        # The files are of one form whatever was trained.
        said_by_vllm(tmp_path / "hf") if "model.lora=lora" in knobs else expected,
    ):
        for mine, theirs in zip(expected, said, strict=True):
            np.testing.assert_allclose(theirs, mine, atol=1e-4)
