"""The learner's step: its rate against a large matrix product, its memory against the plan."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from async_rl.composition.compose import compose
from async_rl.composition.overrides import with_defaults
from async_rl.core.types import Group
from async_rl.learner.trainer import Trainer
from async_rl.planning.estimate import gpu_memory_mb, memory_mb
from async_rl.planning.shape import shape_from_hf
from benchmarks.qualification.models import group_of, model_directory
from benchmarks.roofline import ATTENTION_SHARE, Gpu, Row, estimate, healthy, load

Numbers = dict[str, float]
_ROUNDS, _WARM_UP = 3, 2
_GROUPS, _SAMPLES, _PROMPT = 4, 8, 64
_RESPONSE_ON_CPU, _RESPONSE_ON_GPU = 64, 512
_WIDTH_ON_CPU, _WIDTH_ON_GPU = 1024, 8192


def utilisation(scratch: Path, settings: list[str]) -> Numbers:
    """Measure steps on a model of the size of Qwen3-0.6B, whatever model the settings name.

    share_of_roofline: the time computed from the kernels for a healthy GPU of this name (for an
    unknown one, by the rates measured here), over the time that the step took.
    """
    own = [text for text in settings if not text.startswith("model.path=")]
    numbers = step(scratch, own)
    config = load(str(scratch / "model"))
    row = Row.of(_GROUPS, samples=_SAMPLES, prompt=_PROMPT, response=_RESPONSE_ON_GPU)
    gpu = healthy(torch.cuda.get_device_name()) or _measured(numbers["product_tflops"] * 1e12)
    computed = estimate(config, gpu, row, is_compiled=True, passes=1)
    numbers["share_of_roofline"] = computed["pass_ms"] / 1e3 / numbers["step_s"]
    return numbers


def _measured(product: float) -> Gpu:
    """The ceilings of this GPU."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    repeat = 10
    for _ in range(2):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        for _ in range(repeat):
            target.copy_(source)
        torch.cuda.synchronize()
        bandwidth = repeat * 2 * source.numel() / (time.perf_counter() - started_s)
    return Gpu(bandwidth, product, ATTENTION_SHARE * product)


def step(scratch: Path, settings: list[str]) -> Numbers:
    """Measure steps of the real learner on this machine's device."""
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    response = _RESPONSE_ON_GPU if has_gpu else _RESPONSE_ON_CPU
    path = model_directory(scratch, settings, is_large=has_gpu)
    defaults = [
        *(["hardware=gpu"] if has_gpu else ["hardware=cpu"]),
        f"data.max_prompt_tokens={_PROMPT}",
        f"data.max_response_tokens={response}",
        f"buffer.groups_per_step={_GROUPS}",
        f"generation.group_size={_SAMPLES}",
    ]
    given = with_defaults([f"model.path={path}"], settings)
    config = compose("grpo_code", with_defaults(given, defaults))
    hf_config = msgspec.json.decode((path / "config.json").read_bytes(), type=dict)
    groups = _groups(response, min(500, hf_config["vocab_size"]))
    rate = _product_flops(device, torch.bfloat16 if has_gpu else torch.float32)
    trainer = Trainer(config, path, rank=0, world_size=1, device=device)
    seconds = []
    for _ in range(_WARM_UP + _ROUNDS):
        started_s = time.perf_counter()
        # Reads the loss, so the device is done when it returns. Version 0, as in the samples.
        trainer.step(groups, 0)
        seconds.append(time.perf_counter() - started_s)
    step_s = statistics.median(seconds[_WARM_UP:])
    shape = shape_from_hf(hf_config)
    needed = _needed_flops(groups, shape.num_active, shape.num_layers, shape.hidden_size)
    used_mb = _used_gpu_mb() if has_gpu else _resident_mb()
    planned_mb = (gpu_memory_mb if has_gpu else memory_mb)(config, "learner", shape)
    return {
        "share_of_product_rate": needed / step_s / rate,
        "step_s": step_s,
        "product_tflops": rate / 1e12,
        "memory_mb": used_mb,
        "planned_mb": float(planned_mb),
        "memory_share_of_plan": used_mb / planned_mb,
    }


def _used_gpu_mb() -> float:
    """The memory of the device that is used, CUDA's context and gaps among it."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20


def _resident_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _groups(response: int, vocabulary: int) -> list[Group]:
    rng = np.random.default_rng(0)

    def rows() -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        prompt = rng.integers(8, vocabulary, _PROMPT)
        whole = [np.concatenate([prompt, rng.integers(8, vocabulary, response)])] * _SAMPLES
        logprobs = np.full(response, -np.log(vocabulary), np.float32)
        versions = np.zeros(response, np.int32)
        return [(row.astype(np.int32), logprobs, versions) for row in whole]

    return [group_of(index, rows(), 0) for index in range(_GROUPS)]


def _product_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOPs per second of a large product of square matrices."""
    width = _WIDTH_ON_GPU if device.type == "cuda" else _WIDTH_ON_CPU
    a, b = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    repeat = 10
    for is_measured in (False, True):
        started_s = time.perf_counter()
        for _ in range(repeat):
            product = a @ b
        # Waits for the device.
        product[0, 0].item()
        if is_measured:
            return repeat * 2 * width**3 / (time.perf_counter() - started_s)
    raise AssertionError("the second round returns")


def _needed_flops(groups: Sequence[Group], parameters: int, layers: int, width: int) -> float:
    """Return the FLOPs that one step needs: 6 per parameter and token, and 12 x width per layer and
    pair of attending tokens.

    The prompt of a group counts once, as the learner computes it. Recomputation does not count.
    """
    num_tokens, pairs = 0, 0.0
    for group in groups:
        prompt = group.trajectories[0].prompt_length
        num_tokens += prompt
        pairs += prompt * (prompt + 1) / 2
        for sample in group.trajectories:
            response = sample.response_length
            num_tokens += response
            # Each response token attends to the prompt and to the response up to itself.
            pairs += response * prompt + response * (response + 1) / 2
    return 6.0 * parameters * num_tokens + 12.0 * layers * width * pairs
