"""The rules of AReaL's configurations that depend on more than one key; see areal.yaml, and
areal_now.yaml for releases since 1.0.
"""

import math
import re

from async_rl.launchers.migration.rules import Fate, Given, Settings, refused, same, translated
from async_rl.launchers.migration.shared import TOKEN_WEIGHTS, engines, halves, learners

_LOSS = "algorithm.policy_loss"
_REJECTION = "actor.rejection_sampling"
_ADVANTAGES = {
    ("group", "group", False): "grpo",
    ("group", None, False): "dr_grpo",
    ("group", None, True): "rloo",
    (None, None, False): "reinforce_plus_plus",
}
"""By the level of the mean and of the deviation, and whether the mean leaves one out."""


def sequence(given: Given) -> Fate:
    """The engine's length limit, which must not cut responses."""
    needed = given.source["dataset.max_prompt_len"] + given.source["ppo.gen.max_new_tokens"]
    # The engine would cut responses that data.max_response_tokens allows.
    if given.value < needed:
        return refused(f"below prompt and response of {needed} tokens: leave it out")
    return same(f"the engine receives what prompt and response need: {needed} tokens")


def layout(given: Given) -> Fate:
    """Layouts such as `vllm:d4p1t2`: of the engines, of the learner, or of both with a `+`."""
    generating, _, training = str(given.value).partition("+")
    if given.key == "actor.backend":
        training = generating
        generating = ""
    # d: data, p: pipeline, t: tensor, c: context parallel.
    generated, trained = (
        {letter: int(size) for letter, size in re.findall(r"([dptc])(\d+)", part)}
        for part in (generating, training)
    )
    settings: Settings = {}
    if generated:
        settings |= engines(math.prod(generated.values()), generated.get("t", 1))
    if trained:
        settings |= learners(math.prod(trained.values()))
        settings["learner.context_ranks"] = trained.get("c", 1)
    if not settings:
        return refused("not of the form vllm:d4t1+d4: set generators.count and learner.ranks")
    return translated(settings, "vLLM and FSDP2, whatever the source used")


def node_gpus(given: Given) -> Fate:
    """The GPUs of one machine, unless layouts divide them."""
    if given.source.get("allocation_mode") or given.source.get("rollout.backend"):
        return same("the layouts of generation and training decide")
    return halves(given.value * given.sibling("n_nodes", 1), 1)


def policy_loss(given: Given) -> Fate:
    """The loss, whose ratio is to the engine's log-probs unless these are computed anew, and the
    behavior weight of the decoupled loss.
    """
    source = given.source
    is_recomputed = given.value or source["actor.recompute_logprob"]
    settings: Settings = {_LOSS: "ppo" if is_recomputed else "ppo_vanilla"}
    if source["actor.importance_sampling_level"] == "sequence":
        settings[_LOSS] = "gspo"
    if source["actor.use_cispo_loss"]:
        settings[_LOSS] = "cispo"
    if source["actor.use_sapo_loss"]:
        settings |= {_LOSS: "plugin", f"{_LOSS}.fn": "async_rl.examples.losses.sapo:loss"}
    settings[f"{_LOSS}.correction"] = "none"
    if not is_recomputed and settings[_LOSS] != "ppo_vanilla":
        reason = "the ratio is to the policy before the update, there to the behavior policy"
        return refused(reason, settings)
    upper = source.get("actor.behav_imp_weight_cap") or source.get(f"{_REJECTION}.upper")
    if not given.value or not (upper or f"{_REJECTION}.level" in source):
        return translated(settings, "no behavior weight")
    level, action, metric = (
        source.get(f"{_REJECTION}.{name}", default)
        for name, default in (("level", "token"), ("action", "mask"), ("metric", "ratio"))
    )
    lower = source.get(f"{_REJECTION}.lower")
    if (level, metric) != ("token", "ratio") or (action == "clamp" and lower):
        return refused("only weights of tokens are bounded here; none is applied", settings)
    settings[f"{_LOSS}.correction"] = "token_tis" if action == "clamp" else "token_mis"
    settings[f"{_LOSS}.correction.max"] = upper or 5.0
    if action == "mask":
        # Without a lower bound one that no weight reaches.
        settings[f"{_LOSS}.correction.min"] = lower or 1e-9
    if settings[_LOSS] == "gspo":
        return refused(TOKEN_WEIGHTS, settings)
    return translated(settings)


def advantage(given: Given) -> Fate:
    """A critic, or the levels of reward_norm, decide which advantage the source computes."""
    source = given.source
    mean, std, is_out = (
        source.get(f"actor.reward_norm.{name}", default)
        for name, default in (("mean_level", None), ("std_level", None), ("mean_leave1out", False))
    )
    if source.get("critic.path"):
        name = "gae"
        is_equal = not (mean or std)
    else:
        name = _ADVANTAGES.get((mean, std, is_out), "")
        is_equal = source["actor.gae_lambda"] == 1 and (source["actor.discount"] == 1 or not mean)
    if not name:
        return refused(f"mean of the {mean}, deviation of the {std}: see algorithm.advantage")
    if is_equal:
        return given.into(name)
    reason = "here rewards of a critic are not normalized, and those of a group not discounted"
    return refused(reason, given.into(name).settings)


def kl(given: Given) -> Fate:
    """The KL in the reward."""
    path = given.rule.to[0]
    if not given.value:
        return given.into("none")
    if not any(key.startswith("ref.") for key in given.source):
        reason = "without ref AReaL subtracts the log-prob itself; no KL here"
        return refused(reason, {path: "none"})
    settings = {path: "reward", f"{path}.coef": given.value}
    if given.sibling("kl_estimator", "k1") != "k1":
        return refused("a KL in the reward is k1", settings)
    if given.source.get("actor.reward_norm.mean_level"):
        reason = "subtracted before rewards are compared in the group, there afterwards"
        return refused(reason, settings)
    return translated(settings)
