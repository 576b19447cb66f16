"""The directory of a model without weights, which passes the checks before a run."""

import json
from pathlib import Path
from typing import Any


def write_model(directory: Path, config: dict[str, Any] | None = None) -> Path:
    """Write config.json, the marks of a tokenizer, and weights without tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config or {"model_type": "qwen3"}))
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return directory
