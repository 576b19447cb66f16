"""What the learner does with the families of models (families.toml)."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FIELDS = {
    "quantization_config": "its weights are quantised (convert them to bfloat16)",
    "attn_logit_softcapping": "its attention caps its logits",
    "final_logit_softcapping": "its output head caps its logits",
}
"""Why a model with these fields in its config.json cannot be trained."""


def refusal(hf_config: Mapping[str, Any]) -> str:
    """Return why the learner cannot train a model with this config.json; empty if it can, or if
    nothing is known.
    """
    fields = {**hf_config, **(hf_config.get("text_config") or {})}
    known = families()[2].get(str(fields.get("model_type")), "")
    return next((reason for field, reason in _FIELDS.items() if fields.get(field)), known)


@functools.cache
def families() -> tuple[dict[str, str], list[str], dict[str, str]]:
    """Return the models that train by model_type of config.json, the types among them whose tensors
    have other names than their files, and the reason of each refused type.
    """
    tree = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    return tree["trains"], tree["renamed"], tree["refused"]
