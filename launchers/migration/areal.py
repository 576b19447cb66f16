"""The rules of an AReaL configuration that depend on more than one key; see areal.yaml."""

from __future__ import annotations

from async_rl.launchers.migration.rules import Fate, Given, refused, same, translated
from async_rl.launchers.migration.shared import to_wandb, token_budget


def sequence(given: Given) -> Fate:
    """The engine's length limit, which must not cut responses."""
    prompt = given.source.get("dataset.max_prompt_len", 256)
    needed = prompt + given.source.get("ppo.gen.max_new_tokens", 256)
    # The engine would cut responses that data.max_response_tokens allows.
    if given.value < needed:
        problem = f"{given.value} is below prompt and response of {needed} tokens"
        return refused(f"{problem}, so it would cut responses; leave it out")
    return same(f"the engine receives what prompt and response need: {needed} tokens")


def adam_betas(given: Given) -> Fate:
    """Join AdamW's two decays."""
    betas = [given.sibling("beta1", 0.9), given.sibling("beta2", 0.95)]
    return translated({given.rule.targets[0]: betas})


def budget(given: Given) -> Fate:
    """The tokens of a training pass."""
    return token_budget(
        given,
        "learner.budget_tokens",
        ("actor_train.mb_spec.max_tokens_per_mb", "critic_train.mb_spec.max_tokens_per_mb"),
    )


def advantage_norm(given: Given) -> Fate:
    """The level at which advantages are normalized."""
    if given.source.get("group_adv_norm"):
        note = "over each prompt's group"
        return translated({"algorithm.normalize_advantages": "group"}, note)
    scope = "batch" if given.value else "none"
    return translated({"algorithm.normalize_advantages": scope})


def value_norm(given: Given) -> Fate:
    """The kind of normalization of values, if there is any."""
    kind = given.sibling("value_norm_type", "exp") if given.value else "none"
    return translated({"algorithm.advantage.critic.value_norm": kind})


def dense(given: Given) -> Fate:
    """Rewards at the steps of a response, or at its end."""
    if not given.value:
        return translated({"reward.placement": "end"}, "one reward at the end")
    placement = "step_deltas" if given.source.get("reward_delta", True) else "steps"
    return translated({"reward.placement": placement}, "a score per complete code block")


def prompt_filter(given: Given) -> Fate:
    """Filter prompts that are solved too often, up to a share of them."""
    share = given.source.get("dataset_max_filter_percentage", 0)
    if not share or given.value >= given.source.get("ppo.max_reward_clip", 20.0):
        return translated({"data.filter.above": None}, "no prompt is filtered out")
    settings = {"data.filter.above": given.value, "data.filter.max_share": share}
    return translated(settings)


def wandb(given: Given) -> Fate:
    """Weights & Biases, under the name of the experiment."""
    if given.value != "online":
        return same("metrics go to the terminal, a file and TensorBoard")
    experiment = given.source.get("experiment_name", "areal")
    return to_wandb(given.sibling("project", None) or experiment)
