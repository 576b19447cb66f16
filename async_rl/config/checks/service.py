"""Checks of a training service (rollout.fn=tinker)."""

from __future__ import annotations

from collections.abc import Iterator

from async_rl.config.run import RunConfig

_FEWEST_SLOTS = 4
"""One for the engine's own policy, one whose weights change, two for adapters from directories."""


def service_problems(config: RunConfig) -> Iterator[str]:
    """Yield the settings that a service cannot have."""
    if not config.agent.is_service:
        return
    name = f"rollout.fn={config.rollout.fn}"
    adapter = config.model.adapter
    if adapter is not None and adapter.slots < _FEWEST_SLOTS:
        yield (
            f"model.lora.slots={adapter.slots} with {name}: every program trains an adapter on the"
            f" same base model; set it to {_FEWEST_SLOTS} or more"
        )
    if adapter is None and config.model.dtype != "float32":
        yield (
            f"model.dtype={config.model.dtype} with {name} and model.lora=none: a step is smaller"
            " than the distance of two such numbers; set model.dtype=float32"
        )
    if not config.generation.provided.serves_adapters:
        yield f"generation.engine={config.generation.engine} with {name}: set it to vllm"
    if config.learner.ranks > 1:
        yield f"learner.ranks={config.learner.ranks} with {name}: not supported; set it to 1"
