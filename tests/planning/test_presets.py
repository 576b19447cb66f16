"""The settings that follow from the model and the GPUs: they fit, and what a user gave stays."""

import operator
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from planning_models import LLAMA_70B, MODELS, QWEN3_06B
from test_fit import LONG, machine, settled

from async_rl.composition.compose import compose_for
from async_rl.composition.overrides import with_defaults
from async_rl.config.run import RunConfig
from async_rl.core.machine import Machine
from async_rl.planning.estimate import CUDA_CONTEXT_MB, gpu_memory_mb, kv_cache_mb, memory_mb
from async_rl.planning.fit import fit_problems
from async_rl.planning.presets import fitted, fleet
from async_rl.planning.shape import shape_from_hf

NODE = machine(8, memory_gb=2048)
CLUSTER = ("launcher=ray", "launcher.nodes=16", "launcher.gpus_per_node=8")


def chosen(
    hf: dict[str, object], on: Machine, *overrides: str, conf: str = "grpo_code"
) -> RunConfig:
    given = [pair.partition("=")[0] for pair in overrides]
    # The preset of a machine whose memory is unknown, as compose leaves it for any model.
    plain = Machine(cores=on.cores, num_gpus=on.num_gpus, memory_mb=on.memory_mb)
    config, _ = compose_for(plain, conf, with_defaults(overrides, LONG))
    whole = fleet(config, on)
    assert whole is not None
    return fitted(config, shape_from_hf(hf), whole, given)


@pytest.mark.parametrize(
    "case", yaml.safe_load(Path(__file__).with_name("plans.yaml").read_text())["plans"]
)
def test_a_plan_has_settings_that_fit_or_is_refused_with_its_numbers(case: dict[str, Any]) -> None:
    hf, given = MODELS[case["model"]], case.get("given", [])
    if case.get("nodes"):
        on = NODE
        config = chosen(hf, on, *with_defaults(given, CLUSTER))
    else:
        on = machine(**{"gpus": 8} | case.get("machine", {}))
        config = chosen(hf, on, *given) if case.get("is_fitted") else settled(on, *given)
    for path, value in case.get("chosen", {}).items():
        assert operator.attrgetter(path)(config) == value, path
    whole = fleet(config, on)
    assert whole is not None
    expected = case.get("problems", [])
    if expected != ["any"]:
        problems = fit_problems(config, shape_from_hf(hf), whole)
        assert len(problems) == len(expected), problems
        assert all(map(re.search, expected, problems)), problems


def test_a_shared_gpu_gives_the_engine_its_cache_in_bytes() -> None:
    on, shape = machine(1), shape_from_hf(QWEN3_06B)
    at_once, in_turns = (
        chosen(QWEN3_06B, on, f"placement={placement}")
        for placement in ("disaggregated", "colocated")
    )
    for config in (at_once, in_turns):
        # Bytes make vLLM skip its measurement, which would count the learner's memory as its own.
        assert config.generation.vllm.kv_cache_mb > 0
        assert fit_problems(config, shape, on) == []
    assert in_turns.generation.vllm.kv_cache_mb > at_once.generation.vllm.kv_cache_mb
    taken = gpu_memory_mb(at_once, "learner", shape) + gpu_memory_mb(at_once, "generator", shape)
    assert taken + CUDA_CONTEXT_MB < on.gpu_mb
    # The cache holds no more sequences than run together.
    few = chosen(QWEN3_06B, on, "generation.vllm.max_num_seqs=16")
    assert few.generation.vllm.kv_cache_mb == kv_cache_mb(few, shape, 16)


def test_a_login_node_says_nothing_about_the_nodes() -> None:
    login = Machine(cores=(0, 1), num_gpus=0, memory_mb=64 << 10)
    config, _ = compose_for(login, "grpo_code", [*LONG, *CLUSTER])
    assert fleet(config, login) is None
    whole = fleet(config, NODE)
    assert whole is not None
    assert (whole.num_gpus, whole.gpu_mb, whole.memory_mb) == (128, 80 << 10, 16 * 2048 << 10)
    local, _ = compose_for(NODE, "grpo_code", [*LONG, "hardware=gpus"])
    assert fleet(local, NODE) is NODE


def test_the_ranks_of_a_node_fit_its_main_memory() -> None:
    config = chosen(LLAMA_70B, NODE, *CLUSTER, "buffer.groups_per_step=64")
    shape = shape_from_hf(LLAMA_70B)
    rank_gb = memory_mb(config, "learner", shape) / 1024
    small = fleet(config, machine(8, memory_gb=int(7 * rank_gb)))
    assert small is not None
    (problem,) = fit_problems(config, shape, small)
    assert problem.startswith(f"the learner ranks of a node need about {8 * rank_gb:.1f} GB")
    assert f"a node has {int(7 * rank_gb)}.0 GB" in problem
