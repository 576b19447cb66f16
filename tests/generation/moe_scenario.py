"""Trains a tiny mixture of experts, pushes each version into vLLM and compares: python
moe_scenario.py KIND SCRATCH OUT. KIND `stock` loads in place, as on GPUs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from async_rl.generation import environment

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.qualification.engine import parity


def save_model(path: Path) -> None:
    torch.manual_seed(7)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,
        norm_topk_prob=True,
        eos_token_id=2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))


if __name__ == "__main__":
    kind, scratch, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if kind == "stock":
        environment.has_core_process = lambda _: True
    model = scratch / "experts"
    save_model(model)
    numbers = parity(scratch, [f"model.path={model}", "model.dtype=float32"])
    out.write_text(json.dumps(numbers))
