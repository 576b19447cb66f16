"""The rules of AReaL's configurations since 1.0 that depend on more than one key; see
areal_now.yaml."""

from __future__ import annotations

import re

from async_rl.launchers.migration.rules import Fate, Given, refused, same, translated
from async_rl.launchers.migration.shared import engines, halves, learners


def _gpus(layout: str) -> tuple[int, int]:
    """Return the GPUs and the tensor parallel width of a layout such as `vllm:d4p1t2`."""
    # d: data, p: pipeline, t: tensor, c: context parallel.
    sizes = {letter: int(size) for letter, size in re.findall(r"([dptc])(\d+)", layout)}
    width = sizes.get("t", 1)
    return sizes.get("d", 1) * sizes.get("p", 1) * sizes.get("c", 1) * width, width


def allocation(given: Given) -> Fate:
    """Two layouts joined by `+`: the first generates, the second trains."""
    generating, joined, training = str(given.value or "").partition("+")
    if not joined:
        return refused("not of the form vllm:d4t1+d4: set generators.count and learner.ranks")
    gpus, width = _gpus(generating.rpartition(":")[2])
    settings = engines(gpus, width) | learners(_gpus(training)[0])
    settings["generation.vllm.tensor_parallel_size"] = width
    return translated(settings, "ranks and engines by GPUs")


def rollout_backend(given: Given) -> Fate:
    """The layout of the engines."""
    name, _, layout = str(given.value).partition(":")
    gpus, width = _gpus(layout)
    settings = {**engines(gpus, width), "generation.vllm.tensor_parallel_size": width}
    note = "" if name == "vllm" else f"vLLM instead of {name}"
    return translated(settings, note)


def actor_backend(given: Given) -> Fate:
    """The layout of the learner."""
    name, _, layout = str(given.value).partition(":")
    return translated(learners(_gpus(layout)[0]), f"FSDP2 instead of {name}")


def node_gpus(given: Given) -> Fate:
    """The GPUs of one machine, unless layouts divide them."""
    if given.source.get("allocation_mode") or given.source.get("rollout.backend"):
        return same("the layouts of generation and training decide")
    return halves(given.value * given.sibling("n_nodes", 1), 1)


def advantage(given: Given) -> Fate:
    """A critic, or the levels of reward_norm, decide which advantage the source computes."""
    if given.source.get("critic.path"):
        return given.into("gae", "the critic of critic.path")
    mean = given.source.get("actor.reward_norm.mean_level")
    std = given.source.get("actor.reward_norm.std_level")
    names = {
        ("group", "group"): "grpo",
        ("group", None): "dr_grpo",
        (None, None): "reinforce_plus_plus",
    }
    if (mean, std) not in names:
        problem = f"reward_norm with the mean of the {mean}, the deviation of the {std}"
        return refused(f"{problem}: see algorithm.advantage")
    return given.into(names[mean, std], f"mean of the {mean}, deviation of the {std}")


def kl_estimator(given: Given) -> Fate:
    """The estimate of the KL in the reward."""
    if not given.sibling("kl_ctl", 0.1) or given.value == "k1":
        return same("a KL in the reward is k1")
    return refused("a KL in the reward is k1; algorithm.kl=loss has k2 and k3")


def advantage_norm(given: Given) -> Fate:
    """The level at which advantages are normalized."""
    mean = given.sibling("mean_level", "batch")
    std = given.sibling("std_level", "batch")
    # One name covers both levels here.
    if mean != std:
        problem = f"mean over {mean}, deviation over {std}"
        return refused(f"{problem}: algorithm.normalize_advantages has one level")
    return translated({"algorithm.normalize_advantages": mean or "none"})
