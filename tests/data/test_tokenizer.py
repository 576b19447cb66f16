"""The tokenizer of a run: the model's or another one, without torch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from data_support import make_config, make_tokenizer
from tables import table

from async_rl.data.tokenizer import load_tokenizer, load_vocabulary_size
from benchmarks.embedded.vocabulary import END, build_tokenizer


@pytest.mark.covers("tokenizer")
def test_the_tokenizer_is_the_model_s_or_another_one_and_the_vocabulary_always_the_model_s(
    tokenizer: Any, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(str(tmp_path / "model"))
    build_tokenizer(["a b c"], 512).save_pretrained(str(tmp_path / "other"))
    own = load_tokenizer(make_config(), tmp_path / "model")
    assert (own.eos_token, own.chat_template) == (END, None)
    assert own.get_vocab() == tokenizer.get_vocab()
    other = load_tokenizer(make_config(f"data.tokenizer={tmp_path / 'other'}"), tmp_path / "model")
    assert len(other.get_vocab()) < len(own.get_vocab())
    sizes = {"model_type": "gemma3_text", "vocab_size": 777}
    for written in (
        {"model_type": "llama", "vocab_size": 777},
        {"model_type": "gemma3", "text_config": sizes},
    ):
        (tmp_path / "model" / "config.json").write_text(json.dumps(written))
        assert load_vocabulary_size(make_config(), tmp_path / "model") == 777 != len(tokenizer)


def test_a_process_that_spares_torch_gets_the_same_tokens_and_texts(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }} ->"
    tokenizer.save_pretrained(str(tmp_path))
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        table(__file__, "without_torch"),
        str(tmp_path),
    ]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert told.strip() == f"None {tokenizer('def f(xs): ->')['input_ids']}"
