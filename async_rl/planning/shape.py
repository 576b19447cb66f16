"""What the config.json of a model says: the sizes that decide its memory, and whether the learner
can train its family (families.toml).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from async_rl.core.frozen import frozen
from async_rl.core.records import read_packaged

# Families name the same numbers differently; the first name that is set counts.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_WITH_QK_NORM = ("qwen3", "olmo2", "olmoe", "gemma3")
FAMILIES = read_packaged(__package__, "families.toml", dict[str, Any])
"""trains: the models that train by model_type of config.json. renamed: the types among them whose
tensors have other names than their files. refused: the reason of each refused type.
"""


@frozen
class ModelShape:
    """The sizes of a decoder-only policy.

    num_parameters: all of them, every expert included.  num_active: the parameters that one token
    uses.  root_parameters: embeddings, output head and last norm, which FSDP gathers together.
    layer_parameters: of the largest layer.  mlp_width: hidden units of the feed-forward part that
    one token uses.  num_heads: attention heads.  query_width, kv_width: values of a token's
    queries and of its keys.
    max_positions: the longest sequence.  is_loaded_whole: every learner rank loads all weights,
    because the files have other names, or may have.
    """

    num_parameters: int
    num_active: int
    root_parameters: int
    layer_parameters: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    query_width: int
    kv_width: int
    mlp_width: int
    has_qk_norm: bool
    max_positions: int
    is_loaded_whole: bool

    @property
    def backbone_parameters(self) -> int:
        """The parameters without an untied output head, as a critic has them."""
        embeddings = self.vocab_size * self.hidden_size
        return self.num_parameters - (self.root_parameters - embeddings - self.hidden_size)


def read_shape(model_path: Path) -> ModelShape | None:
    """Return the shape of the model in a directory; None if it is elsewhere or of another kind."""
    try:
        text = (model_path / "config.json").read_bytes()
        return shape_from_hf(msgspec.json.decode(text, type=dict))
    except (OSError, msgspec.DecodeError, KeyError):
        return None


def shape_from_hf(hf_config: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a decoder-only model from its Hugging Face config.json.

    Raises KeyError if a size is missing.
    """
    # A model of text and images has the sizes of its language model in a section.
    settings = {**hf_config, **hf_config.get("text_config", {})}
    vocab = settings["vocab_size"]
    hidden = settings["hidden_size"]
    layers = settings["num_hidden_layers"]
    heads = settings["num_attention_heads"]
    head_dim = settings.get("head_dim") or hidden // heads
    # Older models have as many key and value heads as query heads, and do not name them.
    kv_width = (settings.get("num_key_value_heads") or heads) * head_dim
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_width
    # Two norms.
    common = attention + 2 * hidden
    num_experts = next((settings[name] for name in _EXPERTS if settings.get(name)), 0)
    feed_forward, active, mlp_width = _feed_forward(settings, num_experts)
    dense = 3 * hidden * settings["intermediate_size"]
    num_dense = _num_dense_layers(settings) if num_experts else 0
    kind = settings.get("model_type", "")
    root = (1 if settings.get("tie_word_embeddings") else 2) * vocab * hidden + hidden
    outside = root + layers * common + num_dense * dense
    return ModelShape(
        num_parameters=outside + (layers - num_dense) * feed_forward,
        num_active=outside + (layers - num_dense) * active,
        root_parameters=root,
        layer_parameters=common + feed_forward,
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        query_width=heads * head_dim,
        kv_width=kv_width,
        mlp_width=mlp_width,
        has_qk_norm=kind.startswith(_WITH_QK_NORM),
        max_positions=settings["max_position_embeddings"],
        is_loaded_whole=kind in FAMILIES["renamed"]
        or (active < feed_forward and kind not in FAMILIES["trains"]),
    )


def _feed_forward(settings: Mapping[str, Any], num_experts: int) -> tuple[int, int, int]:
    """The parameters of a layer's feed-forward part, those that a token uses, and their width."""
    hidden = settings["hidden_size"]
    if not num_experts:
        width = settings["intermediate_size"]
        # Gate, up and down projection.
        return 3 * hidden * width, 3 * hidden * width, width
    width = settings.get("moe_intermediate_size") or settings["intermediate_size"]
    shared = settings.get("shared_expert_intermediate_size") or 0
    shared += (settings.get("n_shared_experts") or 0) * width
    router = hidden * num_experts
    used = settings["num_experts_per_tok"] * width + shared
    every = num_experts * width + shared
    return router + 3 * hidden * every, router + 3 * hidden * used, used


def _num_dense_layers(settings: Mapping[str, Any]) -> int:
    """Return how many layers of a mixture of experts have an ordinary feed-forward part."""
    layers = settings["num_hidden_layers"]
    # Qwen: the listed layers, and all but every n-th. DeepSeek: the first ones.
    listed = set(settings.get("mlp_only_layers") or ())
    step = settings.get("decoder_sparse_step") or 1
    listed |= {layer for layer in range(layers) if (layer + 1) % step}
    listed |= set(range(settings.get("first_k_dense_replace") or 0))
    return len(listed)


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
    known = FAMILIES["refused"].get(str(fields.get("model_type")), "")
    return next((reason for field, reason in _FIELDS.items() if fields.get(field)), known)
