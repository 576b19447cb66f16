"""A random model with a tokenizer and a chat template, for runs whose samples need not be right."""

from pathlib import Path
from typing import Any

_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}{% if"
    " add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_model(path: Path, words: str) -> Path:
    """Write a random model of a few thousand parameters that knows the words."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from benchmarks.embedded.vocabulary import build_tokenizer

    tokenizer: Any = build_tokenizer([f"{words} <user> <assistant>"], 128)
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(shape).save_pretrained(path)
    return path
