"""Log-probs, temperature and sampling of vLLM's Model Runner V2, whose Triton kernels no engine on
a CPU runs: the interpreter of Triton runs them on tensors in main memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

TRITON = Path(sys.prefix, "kernels")
"""Where `make kernels` installs requirements/kernels.lock: beside the environment, because vLLM's
CPU build warns in every process that finds a Triton without a CPU backend."""
TOLERANCE = 1e-5
DTYPES = ("torch.float32", "torch.bfloat16")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not TRITON.is_dir(), reason=f"Triton is not in {TRITON}; run make kernels"),
]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("kernels") / "said.json"
    script = Path(__file__).with_name("gpu_kernels_scenario.py")
    variables = {"PYTHONPATH": str(TRITON), "TRITON_F32_DEFAULT": "ieee", "OMP_NUM_THREADS": "1"}
    # Not in a fork: vLLM is imported with Triton here.
    subprocess.run([sys.executable, script, out], env=os.environ | variables, check=True)
    said: dict[str, Any] = json.loads(out.read_text())
    return said


@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_are_those_of_the_tempered_distribution(said: dict[str, Any], dtype: str) -> None:
    samples = said[dtype]["samples"]
    assert samples["temperatures"] == [2.0, 1.0, 0.7, 0.0]
    for logits, temperature, token, logprob in zip(
        samples["logits"],
        samples["temperatures"],
        samples["tokens"],
        samples["logprobs"],
        strict=True,
    ):
        tempered = torch.tensor(logits) / (temperature or 1.0)
        assert logprob == pytest.approx(float(tempered.log_softmax(-1)[token]), abs=TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_temperature_0_takes_the_likeliest_token(said: dict[str, Any], dtype: str) -> None:
    samples = said[dtype]["samples"]
    assert samples["tokens"][3] == int(np.argmax(samples["logits"][3]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_probe_scores_prompts_at_temperature_1_across_chunks(
    said: dict[str, Any], dtype: str
) -> None:
    prompts = said[dtype]["prompts"]
    for name, row, logits in zip(("r0", "r1"), prompts["rows"], prompts["logits"], strict=True):
        table = torch.tensor(logits).log_softmax(-1)[:-1]
        expected = table.gather(-1, torch.tensor(row, dtype=torch.int64)[1:, None])[:, 0]
        found = torch.tensor(prompts["logprobs"][name])
        assert found.shape == expected.shape
        assert float((found - expected).abs().max()) < TOLERANCE


def test_tokens_are_drawn_as_often_as_their_logprobs_say(said: dict[str, Any]) -> None:
    drawn = said["frequencies"]
    expected = torch.softmax(torch.tensor(drawn["logits"]) / drawn["temperature"], -1).numpy()
    counts = np.array(drawn["counts"])
    chi_square = float(((counts - counts.sum() * expected) ** 2 / (counts.sum() * expected)).sum())
    # 18.5 is exceeded once in 1,000 draws with 4 degrees of freedom; the seeds are fixed.
    assert chi_square < 18.5


def test_large_logits_do_not_overflow(said: dict[str, Any]) -> None:
    assert said["far_apart"] == pytest.approx([-3.0 - np.log1p(np.exp(-3.0))], abs=1e-3)


def test_triton_reads_the_precision_of_float32_products(said: dict[str, Any]) -> None:
    assert said["float32_products"] == "ieee"
