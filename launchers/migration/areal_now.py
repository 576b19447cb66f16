"""The rules of AReaL's configurations since 1.0 that depend on more than one key; see
areal_now.yaml."""

from __future__ import annotations

import re
from collections.abc import Mapping

from async_rl.launchers.migration.rules import Fate, Function, Given
from async_rl.launchers.migration.shared import engines, halves, learners

# AReaL writes "all tokens" as a number above any vocabulary.
_FULL_TOP_K = 1_000_000


def _gpus(layout: str) -> tuple[int, int]:
    """Return the GPUs and the tensor parallel width of a layout such as `vllm:d4p1t2`."""
    sizes = {letter: int(size) for letter, size in re.findall(r"([dptc])(\d+)", layout)}
    width = sizes.get("t", 1)
    return sizes.get("d", 1) * sizes.get("p", 1) * sizes.get("c", 1) * width, width


def _allocation(given: Given) -> Fate:
    """Two layouts joined by `+`: the first generates, the second trains."""
    generating, joined, training = str(given.value or "").partition("+")
    if not joined:
        return Fate(
            "refused", "not of the form vllm:d4t1+d4: set generators.count and learner.ranks"
        )
    gpus, width = _gpus(generating.rpartition(":")[2])
    settings = engines(gpus, width) | learners(_gpus(training)[0])
    settings["generation.vllm.tensor_parallel_size"] = width
    return Fate("translated", "ranks and engines by GPUs", settings)


def _rollout_backend(given: Given) -> Fate:
    name, _, layout = str(given.value).partition(":")
    gpus, width = _gpus(layout)
    settings = {**engines(gpus, width), "generation.vllm.tensor_parallel_size": width}
    note = "" if name == "vllm" else f"vLLM instead of {name}"
    return Fate("translated", note, settings)


def _actor_backend(given: Given) -> Fate:
    name, _, layout = str(given.value).partition(":")
    return Fate("translated", f"FSDP2 instead of {name}", learners(_gpus(layout)[0]))


def _node_gpus(given: Given) -> Fate:
    if given.source.get("allocation_mode") or given.source.get("rollout.backend"):
        return Fate("defaulted", "the layouts of generation and training decide")
    return halves(given.value * given.sibling("n_nodes", 1), 1)


def _top_k(given: Given) -> Fate:
    if given.value < 0 or given.value >= _FULL_TOP_K:
        return Fate("defaulted", "the full support")
    return Fate("refused", "log-probs would cover another support than the learner's; set -1")


def _advantage(given: Given) -> Fate:
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
        return Fate("refused", f"{problem}: see algorithm.advantage")
    return given.into(names[mean, std], f"mean of the {mean}, deviation of the {std}")


def _kl(given: Given) -> Fate:
    if not given.value:
        return Fate("translated", "no KL term", {"algorithm.kl": "none"})
    settings = {"algorithm.kl": "reward", "algorithm.kl.coef": given.value}
    return Fate("translated", settings=settings)


def _kl_estimator(given: Given) -> Fate:
    if not given.sibling("kl_ctl", 0.1) or given.value == "k1":
        return Fate("defaulted", "a KL in the reward is k1")
    return Fate("refused", "a KL in the reward is k1; algorithm.kl=loss has k2 and k3")


def _advantage_norm(given: Given) -> Fate:
    mean = given.sibling("mean_level", "batch")
    std = given.sibling("std_level", "batch")
    if mean != std:
        problem = f"mean over {mean}, deviation over {std}"
        return Fate("refused", f"{problem}: algorithm.normalize_advantages has one level")
    return Fate("translated", settings={"algorithm.normalize_advantages": mean or "none"})


def _clip(given: Given) -> Fate:
    settings = {
        "algorithm.policy_loss.clip_low": given.value,
        "algorithm.policy_loss.clip_high": given.sibling("eps_clip_higher", None) or given.value,
    }
    return Fate("translated", settings=settings)


def _bias(given: Given) -> Fate:
    # The source adds its bias, this project subtracts it.
    return given.into(-given.value, "subtracted here")


def _decoupled(given: Given) -> Fate:
    if given.value:
        return Fate("defaulted", "algorithm.policy_loss=ppo is decoupled")
    note = "the ratio to the behavior policy is clipped"
    return Fate("translated", note, {"algorithm.policy_loss": "ppo_vanilla"})


def _weight_cap(given: Given) -> Fate:
    if given.value is None:
        return Fate("translated", "no cap", {"algorithm.policy_loss.correction": "none"})
    settings = {
        "algorithm.policy_loss.correction": "token_mis",
        "algorithm.policy_loss.correction.max": given.value,
        # The source has no lower bound; this one is never reached.
        "algorithm.policy_loss.correction.min": 1e-6,
    }
    return Fate("translated", "tokens beyond it are masked", settings)


def _overlong(given: Given) -> Fate:
    if not given.value:
        return Fate("defaulted", "long responses have no penalty")
    settings = {
        "reward.overlong_tokens": given.sibling("overlong_tokens", None) or 0,
        "reward.overlong_penalty": given.sibling("overlong_penalty_factor", None) or 1.0,
    }
    return Fate("translated", settings=settings)


def _prompt_tokens(given: Given) -> Fate:
    if given.value is None:
        return Fate("defaulted", "data.max_prompt_tokens")
    settings = {"data.max_prompt_tokens": given.value, "data.truncation": "drop"}
    return Fate("translated", "longer prompts are left out", settings)


FUNCTIONS: Mapping[str, Function] = {
    "allocation": _allocation,
    "rollout_backend": _rollout_backend,
    "actor_backend": _actor_backend,
    "node_gpus": _node_gpus,
    "top_k": _top_k,
    "advantage": _advantage,
    "kl": _kl,
    "kl_estimator": _kl_estimator,
    "advantage_norm": _advantage_norm,
    "clip": _clip,
    "bias": _bias,
    "decoupled": _decoupled,
    "weight_cap": _weight_cap,
    "overlong": _overlong,
    "prompt_tokens": _prompt_tokens,
}
