"""An exported policy has the form of the model of the start, and transformers computes what the
learner computes.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_support import make_groups, make_model, make_trainer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

ROWS = [np.array(row, dtype=np.int32) for row in ([3, 1, 4, 1, 5], [2, 7, 1, 8], range(40))]


@torch.no_grad()
def said_by_transformers(path: Path) -> list[np.ndarray]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    for ids in (torch.from_numpy(row).long()[None] for row in ROWS):
        logp = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
        found.append(np.array([0.0, *logp[:, 0].tolist()]))
    return found


def form_of(path: Path) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """What an engine reads of the weights, besides their numbers."""
    return {name: (t.dtype, t.shape) for name, t in load_file(path / "model.safetensors").items()}


@pytest.mark.parametrize(
    ("conf", "knobs"),
    [
        ("grpo_code", ()),
        ("ppo_code", ("algorithm.advantage.critic=shared",)),
        ("grpo_code", ("model.lora=lora", "model.lora.rank=8", "model.lora.alpha=64")),
    ],
)
def test_the_export_has_the_form_of_the_start_and_transformers_agrees_with_the_learner(
    tmp_path: Path, conf: str, knobs: tuple[str, ...]
) -> None:
    start = make_model(tmp_path / "start", hidden=128, scale=2.0)
    trainer = make_trainer(start, conf, "learner.optimizer.lr=1e-2", *knobs)
    trainer.step(make_groups(), 0)
    trainer.export_hf(tmp_path / "hf")
    expected, before = (t.logprobs(ROWS) for t in (trainer, make_trainer(start, "grpo_code")))
    # The export is not the start.
    assert max(float(np.abs(a - b).max()) for a, b in zip(expected, before, strict=True)) > 0.1
    for mine, theirs in zip(expected, said_by_transformers(tmp_path / "hf"), strict=True):
        np.testing.assert_allclose(theirs, mine, atol=1e-4)
    # vLLM loads the start, so it loads a directory of the same form.
    assert form_of(tmp_path / "hf") == form_of(start)
    configs = [json.loads((path / "config.json").read_text()) for path in (start, tmp_path / "hf")]
    assert configs[0] == configs[1]
