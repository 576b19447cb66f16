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
    if adapter is None or adapter.slots < _FEWEST_SLOTS:
        yield (
            f"model.lora with {name}: every program trains an adapter on the same base model; set"
            f" model.lora=lora and model.lora.slots={_FEWEST_SLOTS} or more"
        )
    if config.learner.ranks > 1:
        yield f"learner.ranks={config.learner.ranks} with {name}: not supported; set it to 1"
