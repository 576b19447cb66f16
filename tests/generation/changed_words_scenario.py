"""Changed words in models of vLLM as they are on a GPU, whose layers are not packed."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

from async_rl.composition.compose import compose
from async_rl.core.errors import AsyncRLError
from async_rl.generation.engine import read_model_facts
from async_rl.generation.vllm.model import change_words, has_plain_weights, second_model
from async_rl.generation.vllm.opening import engine_args
from async_rl.protocol.weights import Manifest
from async_rl.weights.tensors import compared, layout, tensor_spec

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # First: vLLM makes the group of experts when it starts with such a model.
    "Qwen3 with experts": ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 32}),
    "Qwen3, tied": ("Qwen3", {"tie_word_embeddings": True}),
    "Llama, untied": ("Llama", {"tie_word_embeddings": False}),
    "Qwen2, biases": ("Qwen2", {"tie_word_embeddings": False}),
    "Gemma2": ("Gemma2", {"head_dim": 32}),
    "Phi3, fused in its checkpoint": ("Phi3", {"pad_token_id": 0, "head_dim": None}),
    "Granite": ("Granite", {}),
}


def stock(family: str, more: dict[str, Any]) -> PreTrainedModel:
    """A random model of a family of transformers, in bfloat16."""
    torch.manual_seed(3)
    kind: type[PretrainedConfig] = getattr(transformers, f"{family}Config")
    sizes = {name: value for name, value in (SIZES | more).items() if value is not None}
    model: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(kind(**sizes))
    return model.to(torch.bfloat16)


def changed(family: str, more: dict[str, Any], scratch: Path) -> dict[str, Any]:
    source = stock(family, more)
    path = scratch / family
    source.save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    overrides = [f"model.path={path}", "model.dtype=bfloat16", "hardware=cpu"]
    config = engine_args(
        compose("grpo_code", overrides), path, read_model_facts(path), 0
    ).create_engine_config()
    before = {name: p.detach().clone() for name, p in source.named_parameters()}
    after = {name: tensor.clone() for name, tensor in before.items()}
    for tensor in after.values():
        chosen = torch.rand(tensor.shape) < 0.02
        tensor[chosen] = torch.randn(int(chosen.sum())).to(tensor.dtype)
    entries, total_bytes = layout(tensor_spec(name, tensor) for name, tensor in after.items())
    manifest = Manifest(version=2, path="", tensors=entries, total_bytes=total_bytes, checksum=0)

    def words(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(-1).view(torch.int16)

    with set_current_vllm_config(config), torch.no_grad():
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{scratch}/ranks", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
        models: list[Any] = [second_model(config) for _ in range(2)]
        for model, tensors in zip(models, (before, after), strict=True):
            model.load_weights(iter(tensors.items()))
        lists = ((n, compared(words(before[n]), words(after[n]))) for n in after)
        is_plain = has_plain_weights(models[0])
        if not is_plain:
            return {"is_plain": False}
        change_words(models[0], manifest, lists)
        expected = dict(models[1].named_parameters())
        partly = iter(
            [("model.embed_tokens.weight", compared(*2 * [words(before[entries[0].name])]))]
        )
        try:
            change_words(models[0], manifest, partly)
            refused = ""
        except AsyncRLError as error:
            refused = str(error)
        return {
            "is_plain": True,
            "refused": refused,
            "equal": all(
                torch.equal(words(parameter), words(expected[name]))
                for name, parameter in models[0].named_parameters()
            ),
        }


def main(scratch: Path) -> dict[str, dict[str, Any]]:
    return {name: changed(*family, scratch) for name, family in FAMILIES.items()}
