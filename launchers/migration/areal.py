"""The rules of an AReaL configuration that depend on more than one key; see areal.yaml."""

from __future__ import annotations

from collections.abc import Mapping

from async_rl.launchers.migration.rules import Fate, Function, Given
from async_rl.launchers.migration.shared import to_wandb, token_budget


def _sequence(given: Given) -> Fate:
    prompt = given.source.get("dataset.max_prompt_len", 256)
    needed = prompt + given.source.get("ppo.gen.max_new_tokens", 256)
    # The engine would cut responses that data.max_response_tokens allows.
    if given.value < needed:
        problem = f"{given.value} is below prompt and response of {needed} tokens"
        return Fate("refused", f"{problem}, so it would cut responses; leave it out")
    return Fate("defaulted", f"the engine receives what prompt and response need: {needed} tokens")


def _adam_betas(given: Given) -> Fate:
    betas = [given.sibling("beta1", 0.9), given.sibling("beta2", 0.95)]
    return Fate("translated", settings={given.rule.targets[0]: betas})


def _budget(given: Given) -> Fate:
    return token_budget(
        given,
        "learner.budget_tokens",
        ("actor_train.mb_spec.max_tokens_per_mb", "critic_train.mb_spec.max_tokens_per_mb"),
    )


def _advantage_norm(given: Given) -> Fate:
    if given.source.get("group_adv_norm"):
        note = "over each prompt's group"
        return Fate("translated", note, {"algorithm.normalize_advantages": "group"})
    scope = "batch" if given.value else "none"
    return Fate("translated", settings={"algorithm.normalize_advantages": scope})


def _value_norm(given: Given) -> Fate:
    kind = given.sibling("value_norm_type", "exp") if given.value else "none"
    return Fate("translated", settings={"algorithm.advantage.critic.value_norm": kind})


def _dense(given: Given) -> Fate:
    if not given.value:
        return Fate("translated", "one reward at the end", {"reward.placement": "end"})
    placement = "step_deltas" if given.source.get("reward_delta", True) else "steps"
    return Fate("translated", "a score per complete code block", {"reward.placement": placement})


def _prompt_filter(given: Given) -> Fate:
    share = given.source.get("dataset_max_filter_percentage", 0)
    if not share or given.value >= given.source.get("ppo.max_reward_clip", 20.0):
        return Fate("translated", "no prompt is filtered out", {"data.filter.above": None})
    settings = {"data.filter.above": given.value, "data.filter.max_share": share}
    return Fate("translated", settings=settings)


def _wandb(given: Given) -> Fate:
    if given.value != "online":
        return Fate("defaulted", "metrics go to the terminal, a file and TensorBoard")
    experiment = given.source.get("experiment_name", "areal")
    return to_wandb(given.sibling("project", None) or experiment)


FUNCTIONS: Mapping[str, Function] = {
    "sequence": _sequence,
    "adam_betas": _adam_betas,
    "budget": _budget,
    "advantage_norm": _advantage_norm,
    "value_norm": _value_norm,
    "dense": _dense,
    "prompt_filter": _prompt_filter,
    "wandb": _wandb,
}
