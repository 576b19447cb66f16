"""The sizes of real models, as their config.json has them."""

from pathlib import Path
from typing import Any

import yaml

MODELS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("models.yaml").read_text()
)
QWEN3_06B, QWEN3_8B, QWEN3_32B = (MODELS[f"QWEN3_{size}"] for size in ("06B", "8B", "32B"))
QWEN3_30B_A3B = MODELS["QWEN3_30B_A3B"]
LLAMA_70B = MODELS["LLAMA_70B"]
SMOLLM2_135M = MODELS["SMOLLM2_135M"]
