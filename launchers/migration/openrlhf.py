"""The rules of OpenRLHF's flags that depend on more than one flag; see openrlhf.yaml."""

from __future__ import annotations

from async_rl.launchers.migration.rules import Fate, Given, refused, same, translated
from async_rl.launchers.migration.shared import engines

_ADVANTAGES = {
    "gae": "gae",
    "reinforce": "reinforce_plus_plus",
    "reinforce_baseline": "reinforce_plus_plus_baseline",
    "rloo": "rloo",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
}
_CORRECTIONS = {
    ("token", "mask"): "token_mis",
    ("token", "clip"): "token_tis",
    ("seq", "mask"): "sequence_mis",
    ("seq", "clip"): "sequence_tis",
}
_IS = "algo.advantage.is_correction"


def minibatches(given: Given) -> Fate:
    """train.batch_size counts samples, rollout.batch_size prompts."""
    prompts = given.source.get("rollout.batch_size", 1024)
    samples = prompts * given.source.get("rollout.n_samples_per_prompt", 1)
    # Minibatches have equal sizes, so that their gradients have equal weight.
    if samples % given.value:
        return refused(f"does not divide {samples} samples; set learner.minibatches")
    return given.into(samples // given.value, f"{samples} samples / {given.value}")


def advantage(given: Given) -> Fate:
    """The estimator, GRPO without its division under the name that it has here."""
    if given.value not in _ADVANTAGES:
        return refused(f"{given.value} has no counterpart; see algorithm.advantage")
    name = _ADVANTAGES[given.value]
    if name == "grpo" and given.sibling("no_std_norm", False):
        name = "dr_grpo"
    return given.into(name)


def engine_gpus(given: Given) -> Fate:
    """The engines, each on as many GPUs as it has parts."""
    if given.value is None:
        return refused("names no engine: set generators.count and generators.gpus_each")
    width = given.sibling("tensor_parallel_size", 1)
    return translated(engines(given.value * width, width))


def ranks(given: Given) -> Fate:
    """The learner's GPUs on all machines."""
    ranks = given.value * given.sibling("num_nodes", 1)
    return translated({"learner.ranks": ranks, "learner.gpus_each": 1})


def clip(given: Given) -> Fate:
    """One bound of the ratio, or two."""
    low, high = given.sibling("eps_clip_low_high", None) or (given.value, given.value)
    settings = {"algorithm.policy_loss.clip_low": low, "algorithm.policy_loss.clip_high": high}
    return translated(settings)


def kl(given: Given) -> Fate:
    """The KL in the reward or in the loss."""
    if not given.value:
        return translated({"algorithm.kl": "none"}, "no KL term")
    kind = "loss" if given.sibling("use_loss", False) else "reward"
    settings = {"algorithm.kl": kind, "algorithm.kl.coef": given.value}
    return translated(settings)


def kl_estimator(given: Given) -> Fate:
    """The estimate of the KL, as far as its place allows."""
    if not given.sibling("use_loss", False) or not given.sibling("init_coef", 0.01):
        if given.value == "k1":
            return same("a KL in the reward is this estimate")
        return refused("a KL in the reward is k1; set algo.kl.use_loss")
    if given.value == "k1":
        return refused("in the loss k1 has no expected gradient; set k3")
    return given.into(given.value)


def correction(given: Given) -> Fate:
    """The importance sampling of the rollout's log-probs."""
    if given.value == "off":
        return translated({"algorithm.policy_loss.correction": "none"})
    mode = given.source.get(f"{_IS}_mode", "mask")
    if given.source.get(f"{_IS}_gating", "ratio") != "ratio":
        return refused("bounds are of the ratio; see algorithm.policy_loss.correction")
    low, high = given.source.get(f"{_IS}_threshold", (0.5, 5.0))
    settings = {
        "algorithm.policy_loss.correction": _CORRECTIONS[given.value, mode],
        "algorithm.policy_loss.correction.max": high,
    }
    if mode == "mask":
        settings["algorithm.policy_loss.correction.min"] = low
    return translated(settings)


def reward_clip(given: Given) -> Fate:
    """A symmetric range of rewards."""
    low, high = given.value
    if low != -high:
        return refused("reward.clip bounds the absolute value: the range is symmetric")
    return given.into(high)


def age(given: Given) -> Fate:
    """The age of data that the queue allows."""
    if not given.source.get("train.async_enable", False):
        return given.into(0, "synchronous; generation may run ahead here: raise it")
    # One batch is trained while the queue is full.
    return given.into(given.value + 1, "the queue and the batch in use")
