"""The rules of prime-rl's rl.toml that depend on more than one key; see prime_rl.yaml."""

from __future__ import annotations

from async_rl.launchers.migration.rules import Fate, Given, refused, translated
from async_rl.launchers.migration.shared import engines, to_wandb

_SAMPLES = ("orchestrator.group_size", "orchestrator.rollouts_per_example")
_RESPONSE = (
    "orchestrator.train.sampling.max_completion_tokens",
    "orchestrator.sampling.max_tokens",
)


def batch(given: Given) -> Fate:
    """A batch counts samples, buffer.groups_per_step prompts."""
    samples = next((given.source[key] for key in _SAMPLES if key in given.source), 1)
    if given.value % samples:
        return refused(f"not a multiple of {samples} samples; set buffer.groups_per_step")
    return given.into(given.value // samples, f"{given.value} samples / {samples}")


def sequence(given: Given) -> Fate:
    """The length bounds prompt and response together."""
    response = next((given.source[key] for key in _RESPONSE if key in given.source), None)
    if response is None:
        # No key says how long prompts are.
        half = given.value // 2
        settings = {"data.max_prompt_tokens": given.value - half, "data.max_response_tokens": half}
        return translated(settings, "half for the prompt, half for the response")
    if response >= given.value:
        note = "the response may use all of it; a prompt has a separate limit"
        return translated({"data.max_response_tokens": response}, note)
    left = given.value - response
    return translated({"data.max_prompt_tokens": left}, f"{given.value} - {response}")


def engine_gpus(given: Given) -> Fate:
    """The engines, each on as many GPUs as it has parts."""
    width = given.source.get("inference.parallel.tp", 1)
    # The newer name wins over the older one.
    width = given.source.get("inference.vllm.tensor_parallel_size", width)
    settings = engines(given.value, width)
    return translated({**settings, "generation.vllm.tensor_parallel_size": width})


def min_lr(given: Given) -> Fate:
    """The last learning rate becomes a share of the first."""
    peak = given.source.get("trainer.optim.lr", 1e-6)
    return given.into(min(round(given.value / peak, 6), 1.0), f"{given.value} / {peak}")


def wandb(given: Given) -> Fate:
    """Weights & Biases, under the name of the project."""
    return to_wandb(given.value or "prime-rl")
