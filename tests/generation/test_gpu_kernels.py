"""Log-probs, temperature and sampling of vLLM's Model Runner V2, whose Triton kernels no engine on
a CPU runs: the interpreter of Triton runs them on tensors in main memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

TRITON = Path(sys.prefix, "kernels")
"""Where `make kernels` installs requirements/kernels.lock: beside the environment, because vLLM's
CPU build warns in every process that finds a Triton without a CPU backend."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not TRITON.is_dir(), reason=f"Triton is not in {TRITON}; run make kernels"),
]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("kernels") / "said"
    script = Path(__file__).with_name("gpu_kernels_scenario.py")
    variables = {"PYTHONPATH": str(TRITON), "TRITON_F32_DEFAULT": "ieee", "OMP_NUM_THREADS": "1"}
    # Not in a fork: vLLM is imported with Triton here.
    subprocess.run([sys.executable, script, out], env=os.environ | variables, check=True)
    said: dict[str, Any] = torch.load(out, weights_only=True)
    return said


def test_logprobs_are_those_of_the_tempered_distribution(said: dict[str, Any]) -> None:
    samples = said["samples"]
    assert samples["temperatures"].tolist() == [2.0, 1.0, pytest.approx(0.7), 0.0]
    tempered = (
        samples["logits"] / samples["temperatures"].where(samples["temperatures"] > 0, 1.0)[:, None]
    )
    expected = tempered.log_softmax(-1).gather(-1, samples["tokens"][:, None].long())[:, 0]
    torch.testing.assert_close(samples["logprobs"], expected, atol=1e-5, rtol=0)
    # Temperature 0 takes the likeliest token.
    assert samples["tokens"][3] == samples["logits"][3].argmax()


def test_the_probe_scores_prompts_at_temperature_1_across_chunks(said: dict[str, Any]) -> None:
    prompts = said["prompts"]
    for name, row, logits in zip(("r0", "r1"), prompts["rows"], prompts["logits"], strict=True):
        expected = logits.log_softmax(-1)[:-1].gather(-1, row[1:, None].long())[:, 0]
        torch.testing.assert_close(prompts["logprobs"][name], expected, atol=1e-5, rtol=0)


def test_triton_reads_the_precision_of_float32_products(said: dict[str, Any]) -> None:
    assert said["float32_products"] == "ieee"
