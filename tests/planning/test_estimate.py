"""Facts about what a run amounts to before it starts."""

import pytest
from composing import compose, compose_unchecked
from planning_models import QWEN3_06B, SMOLLM2_135M

from async_rl.composition.hardware import model_shape
from async_rl.config.base import replace
from async_rl.core.machine import Machine
from async_rl.data.model_files import EMBEDDED as FILES
from async_rl.planning.estimate import ROW_BYTES, disk_mb, memory_mb
from async_rl.planning.fit import derived_numbers, fit_problems
from async_rl.planning.shape import read_shape, shape_from_hf


def machine_with(memory_mb: int, *, gpus: int = 0, gpu_mb: int = 0) -> Machine:
    return Machine(
        cores=tuple(range(16)), num_gpus=gpus, memory_mb=memory_mb, gpu_mb=gpu_mb, disk_mb=10**9
    )


EMBEDDED = read_shape(FILES / "tiny_coder")


def test_the_plan_names_a_loss_for_old_data() -> None:
    for age, algorithm, is_warned in (
        *((7, "grpo", False), (8, "grpo", True), (64, "rloo", True)),
        *((64, kind, False) for kind in ("gspo", "vcpo", "vespo")),
    ):
        words = [f"buffer.max_staleness_versions={age}", f"algorithm={algorithm}"]
        rows = dict(derived_numbers(compose("grpo_code", words), None))
        assert ("algorithm=gspo" in rows.get("old data", "")) is is_warned, words


def test_derived_numbers_follow_from_the_settings() -> None:
    overrides = ["buffer.groups_per_step=8", "generation.group_size=4", "num_steps=10"]
    overrides += ["buffer.max_staleness_versions=3", "evaluation.every_steps=4"]
    overrides += ["data.max_prompt_tokens=20", "data.max_response_tokens=30"]
    config = compose("ppo_code", overrides)
    rows = dict(derived_numbers(config, EMBEDDED))
    assert rows["sequences per step"] == "32 (8 groups x 4)"
    assert rows["tokens per step"] == "at most 1,600 (960 generated)"
    assert rows["staleness bound"] == "3 versions = at most 32 groups in flight"
    assert rows["sequences of the run"] == "320 in 10 steps"
    assert rows["evaluations"].startswith("4 of 256 held-out prompts")
    twice = replace(config, buffer=replace(config.buffer, uses_per_group=2))
    rows = dict(derived_numbers(twice, EMBEDDED))
    assert rows["tokens per step"] == "at most 3,200 (960 generated)"
    assert rows["sequences of the run"] == "320 in 10 steps"


def test_a_run_of_135_million_parameters_took_no_more_than_its_plan() -> None:
    shape = shape_from_hf(SMOLLM2_135M)
    assert shape.num_parameters == pytest.approx(134.5e6, rel=0.001)
    words = ["hardware=cpu", "generators.cores=[0]", "learner.cores=[1]", "model.dtype=float32"]
    config = compose("real", words)
    # The largest of the 14 steps of `make real`: memory/generators_mb_max, memory/learner_mb_max.
    assert 3989 <= memory_mb(config, "generator", shape) < 1.5 * 3989
    assert 4720 <= memory_mb(config, "learner", shape) < 1.5 * 4720


def test_trajectories_older_than_every_checkpoint_need_no_disk() -> None:
    def needed(num_steps: int, *changes: str) -> int:
        return disk_mb(compose("ppo_code", [f"num_steps={num_steps}", *changes]), None)

    sizes = {steps: needed(steps) for steps in (60, 1000, 100_000)}
    # Only the rows of metrics and ledger grow with the run: 4 kB and 0.4 kB per group.
    assert sizes[1000] - sizes[60] < 20
    assert sizes[100_000] - sizes[1000] < 2000
    assert needed(200, "recording=full") > needed(200)
    assert needed(200, "checkpoint.every_steps=0") > needed(200)


def test_a_service_starts_on_a_disk_that_a_run_of_all_its_steps_would_fill() -> None:
    service = compose("serve", [])
    assert service.num_steps * ROW_BYTES > 4e9
    assert disk_mb(service, model_shape(service)) < 1000
    long, longer = (compose("ppo_code", [f"num_steps={n}"]) for n in (20_000, 100_000))
    assert disk_mb(longer, None) - disk_mb(long, None) > 80_000 * ROW_BYTES / 2**20


@pytest.mark.covers("max_seq_len_to_capture")
def test_what_cannot_fit_is_refused_with_both_numbers() -> None:
    long = ["data.max_prompt_tokens=400", "data.max_response_tokens=200"]
    config = compose("ppo_code", long)
    (positions,) = fit_problems(config, EMBEDDED, machine_with(10**6))
    assert "= 600 is above the 512 positions" in positions
    (cache,) = fit_problems(config, shape_from_hf(QWEN3_06B), machine_with(10**6))
    # 2 x 28 layers x 8 heads x 128 x 4 bytes = 224 KiB a token: 4.57 tokens per MiB.
    assert "holds 292 tokens of this model, one sequence may have 600; raise it to at" in cache
    enough = compose("ppo_code", [*long, "generation.vllm.kv_cache_mb=132"])
    assert fit_problems(enough, shape_from_hf(QWEN3_06B), machine_with(10**6)) == []
    config = compose("ppo_code")
    (memory,) = fit_problems(config, EMBEDDED, machine_with(1024))
    assert "this machine has 1.0 GB" in memory
    assert fit_problems(config, EMBEDDED, machine_with(6 * 1024)) == []


@pytest.mark.proves("generation.head_dtype")
def test_the_copy_of_a_float32_head_is_counted_on_a_cpu() -> None:
    shape = shape_from_hf(QWEN3_06B)
    settings = ["generators.gpus_each=0", "model.dtype=bfloat16"]

    def generator_mb(dtype: str) -> int:
        config = compose_unchecked("grpo_code", [*settings, f"generation.head_dtype={dtype}"])
        return memory_mb(config, "generator", shape)

    head_mb = 4 * 151_936 * 1024 / 2**20
    assert generator_mb("float32") - generator_mb("model") == pytest.approx(head_mb, abs=1)
