"""vLLM by itself: its settings, what fewer bits change, changed words, and its memory."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from generation_support import (
    QUANTIZED_ROWS,
    make_model,
    model_from,
    model_of,
    replay,
    run_scenario,
)

# vLLM's cache of fp8 on a CPU needs AVX-512.
HAS_FP8 = "avx512f" in Path("/proc/cpuinfo").read_text()
HEAD = ["generation.head_dtype=float32"]
ENGINES = {
    "weights": ["generation.vllm.extra=['quantization=fp8_per_channel']"],
    "head": [*HEAD, *["generation.vllm.extra=['kv_cache_dtype=fp8']"] * HAS_FP8],
    "hf_head": [*HEAD, "generation.engine=hf"],
}

pytestmark = pytest.mark.slow


@pytest.mark.proves("generation.vllm.extra")
@pytest.mark.covers("load_format and the other engine settings", "ignore_eos")
def test_each_setting_reaches_vllm(tmp_path: Path) -> None:
    """A device is shared: vLLM sleeps, and its share of the memory is none if its cache has a size;
    it refuses a device of which less than the share is free.
    """
    rows = yaml.safe_load(Path(__file__).with_name("engine_settings.yaml").read_text())
    make_model(tmp_path / "model")
    settings = [["hardware=cpu"], *(row[0] for row in rows)]
    plain, *given = run_scenario("small_scenarios:told", tmp_path / "model", settings)
    for (setting, before, after), found in zip(rows, given, strict=True):
        assert {name: plain[name] for name in before} == before, setting
        assert {name: found[name] for name in after} == after, setting


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_of_fewer_bits_rounds_the_weights_of_each_push(tmp_path: Path, name: str) -> None:
    """Pushes reach it, and only a head of float32 has logits that are not rounded."""
    path = tmp_path / "model"
    said, likeliest = run_scenario("small_scenarios:quantized", ENGINES[name], path)
    model = model_from(path)
    own = [
        np.stack(
            [
                replay({version: model_of(model, version)}, first, rest, [version] * len(rest), 1.0)
                for first, rest in ((row[:1], row[1:]) for row in QUANTIZED_ROWS)
            ]
        )
        for version in (0, 1)
    ]
    of_push = np.abs(own[1] - own[0]).mean()
    for version, scores in enumerate(said):
        difference = np.abs(scores[:, 1:] - own[version])
        assert difference.max() > 1e-4
        assert difference.mean() < 0.25 * of_push
    # Logits of bfloat16 above 1 are multiples of 1 / 128.
    gaps = 128 * np.diff(likeliest, axis=1)
    is_rounded = np.abs(gaps - gaps.round()) < 0.01
    assert is_rounded.all() if name == "weights" else is_rounded.mean() < 0.2


def test_a_model_that_gets_what_changed_equals_one_that_gets_all(tmp_path: Path) -> None:
    said = run_scenario("small_scenarios:changed_words", tmp_path)
    assert said.pop("Qwen3Moe") == "not plain", "its kernels read other words"
    assert list(said.values()) == ["equal"] * 6, said


def test_pushes_leave_no_copies_of_the_model(tmp_path: Path) -> None:
    """Before freed weights were returned to the system, a push left a third of the model."""
    size_mb, memory_mb = run_scenario("small_scenarios:pushed_often", tmp_path / "model")
    # The second push is the first that replaces packed weights.
    assert memory_mb[-1] - memory_mb[1] < 0.7 * size_mb, memory_mb
