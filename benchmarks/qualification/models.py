"""Models with random weights, in the shapes that the measurements need."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from async_rl.core.types import FloatArray, Group, IntArray, Purpose, Score, Trajectory

_SETTING = "model.path="
# Head width 64, because attention kernels of GPUs have none below; two layers suffice to compare.
_SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}
_LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "vocab_size": 151_936,
}


def model_directory(scratch: Path, settings: Sequence[str], *, is_large: bool) -> Path:
    """Return the directory of the model that the settings name, or of a random one.

    is_large: with the shape of Qwen3-0.6B.
    """
    named = [setting for setting in settings if setting.startswith(_SETTING)]
    if named:
        return Path(named[-1].removeprefix(_SETTING))
    torch.manual_seed(0)
    config = Qwen3Config(
        **(_LARGE if is_large else _SMALL),
        num_attention_heads=16 if is_large else 2,
        num_key_value_heads=8 if is_large else 1,
        head_dim=128 if is_large else 64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        # With 0.02 the small model's distributions would be nearly uniform for all weights.
        initializer_range=0.02 if is_large else 0.2,
        eos_token_id=2,
    )
    path = scratch / "model"
    Qwen3ForCausalLM(config).save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return path


def group_of(
    index: int, rows: Sequence[tuple[IntArray, FloatArray, IntArray]], version: int
) -> Group:
    """Return a group of whole rows with the log-probs and versions of their last tokens; rewards
    alternate.
    """

    def trajectory(number: int, row: IntArray, logprobs: FloatArray, versions: IntArray) -> Any:
        before = len(row) - len(logprobs)
        return Trajectory(
            token_ids=row,
            prompt_length=before,
            loss_mask=np.arange(len(row)) >= before,
            behavior_logprobs=np.concatenate([np.zeros(before, np.float32), logprobs]),
            versions=np.concatenate([np.full(before, -1, np.int32), versions]),
            is_truncated=False,
            score=Score(reward=float(number % 2), parts={}, verdicts=(), latency_s=0.0),
        )

    return Group(
        group_id=index,
        attempt=1,
        prompt_id=str(index),
        purpose=Purpose.TRAIN,
        data_source="qualify",
        generator="generator-0",
        admitted_version=version,
        trajectories=[trajectory(number, *row) for number, row in enumerate(rows)],
        generation_s=0.0,
    )
