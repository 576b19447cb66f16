"""A training service with vLLM and the unmodified client of the Tinker API: a program whose service
loses every process by SIGKILL gets the same weights, bit for bit, as one that is left alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_support import LiveRun
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from async_rl.service.address import address_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def write_model(path: Path) -> Path:
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=200,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        eos_token_id=2,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(path)
    words = Tokenizer(WordLevel({f"w{n}": n for n in range(200)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    return path


def play(run_dir: Path, model: Path, at: dict[str, Callable[[], object]]) -> dict[str, Any]:
    """Run the program to its end, with a deed at some of its pauses; return what it printed."""
    address = address_of(run_dir)
    script = Path(__file__).with_name("service_program.py")
    url = f"http://127.0.0.1:{address.port}"
    command = [sys.executable, str(script), url, address.api_key, str(model)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    found: dict[str, Any] = json.loads(line)
                    return found
                at.get(line.strip(), lambda: None)()
                process.stdin.write("\n")
                process.stdin.flush()
        finally:
            process.kill()
    raise AssertionError(f"the program ended with {process.returncode}")


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[LiveRun]]:
    runs: list[LiveRun] = []
    yield runs
    for run in runs:
        run.end()


def state_of(run: LiveRun, path: str) -> bytes:
    name, kind, checkpoint = path.removeprefix("tinker://").split("/")
    folder = run.run_dir / "service" / "runs" / name.replace(":", ".") / kind
    (saved,) = folder.glob(f"{checkpoint}~*")
    return (saved / "state.safetensors").read_bytes()


def test_a_service_that_loses_every_process_trains_the_same_bits(
    tmp_path: Path, started: list[LiveRun]
) -> None:
    model = write_model(tmp_path / "model")
    settings = ("conf=serve", f"model.path={model}", "generation.vllm.kv_cache_mb=64")
    run = LiveRun(tmp_path, *settings, name="service")
    started.append(run)
    run.until(lambda: run.member("gateway-0") != {}, "the front")
    left_alone = play(run.run_dir, model, {})

    def lose_everything() -> None:
        started[-1].kill_all()
        started.append(LiveRun(tmp_path, name="service", resumes=True))

    killed = play(
        run.run_dir,
        model,
        {
            "learner": lambda: run.kill("learner-0"),
            "gateway": lambda: run.kill("gateway-0"),
            "everything": lose_everything,
            "generator": lambda: started[-1].kill("generator-0"),
        },
    )
    assert killed["losses"] == left_alone["losses"]
    assert killed["scored"] == left_alone["scored"]
    assert killed["lengths"] == left_alone["lengths"] == [200] * 8
    assert state_of(run, killed["state"]) == state_of(run, left_alone["state"])
    assert killed["state"] != left_alone["state"]
