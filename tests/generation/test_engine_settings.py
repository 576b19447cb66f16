"""The argument of vLLM that each setting of generation.vllm changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from generation_support import END_TOKENS, make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

V = "generation.vllm."
SETTINGS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (f"{V}max_num_seqs=99", {"max_num_seqs": 256}, {"max_num_seqs": 99}),
    (
        f"{V}max_num_batched_tokens=999",
        {"max_num_batched_tokens": 2048},
        {"max_num_batched_tokens": 999},
    ),
    (
        f"{V}gpu_memory_utilization=0.3",
        {"gpu_memory_utilization": 0.85},
        {"gpu_memory_utilization": 0.3},
    ),
    (f"{V}tensor_parallel_size=2", {"tensor_parallel_size": 1}, {"tensor_parallel_size": 2}),
    (f"{V}enforce_eager=false", {"enforce_eager": True}, {"enforce_eager": False}),
    (
        f"{V}kv_cache_mb=32",
        {"kv_cache_memory_bytes": 64 << 20},
        {"kv_cache_memory_bytes": 32 << 20},
    ),
    (
        f'{V}extra=["kv_cache_dtype=fp8","max_logprobs=7"]',
        {"kv_cache_dtype": "auto", "max_logprobs": 20},
        {"kv_cache_dtype": "fp8", "max_logprobs": 7},
    ),
    (f'{V}extra=["block_size=64"]', {"block_size": 32}, {"block_size": 64}),
    (
        f'{V}extra=["use_tqdm_on_load=true"]',
        {"use_tqdm_on_load": False},
        {"use_tqdm_on_load": True},
    ),
    ("model.dtype=bfloat16", {"dtype": "float32"}, {"dtype": "bfloat16"}),
    (
        "data.max_response_tokens=100",
        {"max_model_len": 64 + 64 + 1},
        {"max_model_len": 64 + 100 + 1},
    ),
    (
        "data.longest=responses",
        {"ignore_eos": False, "stop_token_ids": list(END_TOKENS)},
        {"ignore_eos": True, "stop_token_ids": []},
    ),
]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    model = tmp_path_factory.mktemp("settings") / "model"
    make_model(model, is_tied=True)
    out = model.with_name("told.json")
    script = str(Path(__file__).parent / "engine_settings.py")
    overrides = [
        json.dumps(["hardware=cpu", *given])
        for given in ([], *([setting] for setting, *_ in SETTINGS))
    ]
    done = subprocess.run(
        [sys.executable, script, str(model), str(out), *overrides],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(out.read_text())
    return found


@pytest.mark.proves("generation.vllm.extra")
@pytest.mark.covers("load_format and the other engine settings")
@pytest.mark.parametrize("index", range(len(SETTINGS)), ids=[setting for setting, *_ in SETTINGS])
def test_a_setting_reaches_vllm(told: list[dict[str, Any]], index: int) -> None:
    _, before, after = SETTINGS[index]
    assert {name: told[0][name] for name in before} == before
    assert {name: told[1 + index][name] for name in after} == after
