"""The embedded tokenizer: exact round trips and short programs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from data_support import make_config
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.data.tokenizer import load_tokenizer, load_vocabulary_size, spare_torch
from benchmarks.embedded import corpus, list_functions
from benchmarks.embedded.vocabulary import END, build_tokenizer


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_comes_back_exactly(tokenizer: Any, text: str) -> None:
    if "<|" not in text:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_every_solution_comes_back_exactly_in_20_to_45_tokens(tokenizer: Any) -> None:
    _, specs = list_functions.split()
    for spec in specs:
        ids = tokenizer(spec.solution())["input_ids"]
        assert tokenizer.decode(ids) == spec.solution()
        assert 20 <= len(ids) + 1 <= 45


def test_a_prompt_and_its_answer_are_tokenized_alike_apart_and_together(tokenizer: Any) -> None:
    spec = list_functions.Spec(1, 2, 3)
    prompt, answer = list_functions.wording(spec, 0), spec.solution()
    assert (
        tokenizer(prompt)["input_ids"] + tokenizer(answer)["input_ids"]
        == tokenizer(prompt + answer)["input_ids"]
    )


def test_a_saved_tokenizer_loads_with_its_end_token_and_no_chat_template(
    tokenizer: Any, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(str(tmp_path))
    loaded = load_tokenizer(make_config(), tmp_path)
    assert loaded.eos_token == END
    assert loaded.chat_template is None
    assert loaded("def f(xs):\n    ys")["input_ids"] == tokenizer("def f(xs):\n    ys")["input_ids"]


@pytest.mark.parametrize(
    "written",
    [
        {"model_type": "llama", "vocab_size": 777},
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "vocab_size": 777}},
    ],
)
def test_the_vocabulary_is_the_model_s_and_not_the_tokenizer_s(
    tokenizer: Any, tmp_path: Path, written: dict[str, Any]
) -> None:
    tokenizer.save_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert load_vocabulary_size(make_config(), tmp_path) == 777 != len(tokenizer)


@pytest.mark.covers("tokenizer")
def test_another_tokenizer_can_be_named(tokenizer: Any, tmp_path: Path) -> None:
    for name, text in (("model", corpus.vocabulary_text()), ("other", ["a b c"])):
        build_tokenizer(text, 512).save_pretrained(str(tmp_path / name))
    own = load_tokenizer(make_config(), tmp_path / "model")
    other = load_tokenizer(make_config(f"data.tokenizer={tmp_path / 'other'}"), tmp_path / "model")
    assert own.get_vocab() == tokenizer.get_vocab()
    assert len(other.get_vocab()) < len(own.get_vocab())


def test_a_process_that_spares_torch_gets_the_same_tokens_and_texts(
    tokenizer: Any, tmp_path: Path
) -> None:
    tokenizer.chat_template = "{{ messages[0]['content'] }} ->"
    tokenizer.save_pretrained(str(tmp_path))
    program = """
import sys
from pathlib import Path
from async_rl.data.tokenizer import load_tokenizer, spare_torch
from async_rl.composition.compose import compose_unchecked
config = compose_unchecked("grpo_code")
spare_torch(config)
tokenizer = load_tokenizer(config, Path(sys.argv[1]))
text = tokenizer.apply_chat_template([{"role": "user", "content": "def f(xs):"}], tokenize=False)
print(sys.modules["torch"], tokenizer(text)["input_ids"])
"""

    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert told.strip() == f"None {tokenizer('def f(xs): ->')['input_ids']}"


def test_torch_is_not_spared_where_a_tokenizer_brings_its_own_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setenv("TRANSFORMERS_NO_ADVISORY_WARNINGS", "")
    spare_torch(make_config("model.trust_remote_code=true"))
    assert "torch" not in sys.modules
    spare_torch(make_config())
    assert sys.modules["torch"] is None
