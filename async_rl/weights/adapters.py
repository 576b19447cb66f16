"""An adapter as a value, its file, and PEFT's directory with that file."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load, save
from torch import Tensor

from async_rl.core.frozen import frozen


@frozen
class Adapter:
    """One version of an adapter. tensors: whole, float32, with the names of PEFT's files."""

    tensors: Mapping[str, Tensor]
    scaling: float

    def to_bytes(self) -> bytes:
        """Return a safetensors file with the tensors."""
        content: bytes = save(dict(self.tensors), {"format": "pt"})
        return content


def write_peft(directory: Path, content: bytes, scaling: float, **facts: str | None) -> None:
    """Write the file of an adapter as PEFT's directory. facts: further fields of PEFT's
    configuration.
    """
    downs = {name: x for name, x in load(content).items() if name.endswith(".lora_A.weight")}
    rank = next(iter(downs.values())).shape[0]
    described = {
        "peft_type": "LORA",
        "r": rank,
        # PEFT's form has no scaling; its readers compute it as lora_alpha / r.
        "lora_alpha": round(scaling * rank),
        # For example base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight.
        "target_modules": sorted({name.split(".")[-3] for name in downs}),
        **facts,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(described))
    (directory / "adapter_model.safetensors").write_bytes(content)
