"""The rules of TRL's GRPOConfig that depend on more than one key; see trl.yaml.

The table completes every source with the defaults of its release, so the keys below exist.
"""

from typing import Any

from async_rl.launchers.migration.rules import Fate, Given, Settings, refused, translated
from async_rl.launchers.migration.shared import TOKEN_WEIGHTS

_LOSS = "algorithm.policy_loss"
_IS = "vllm_importance_sampling"
_CORRECTIONS = {"truncate": "tis", "mask": "mis"}


def _completions(given: Given) -> Any:
    """The completions of one generation round; the last sum of the source's own."""
    source = given.source
    rounds = source.get("steps_per_generation") or source["gradient_accumulation_steps"]
    return source.get("generation_batch_size") or _pass(given) * rounds


def _pass(given: Given) -> int:
    """The completions of one pass of all processes."""
    source = given.source
    return int(source["per_device_train_batch_size"] * source.get("num_processes", 1))


def _updates(given: Given) -> Any:
    """The optimizer steps of one epoch over a generation round."""
    return max(
        _completions(given) // (_pass(given) * given.source["gradient_accumulation_steps"]), 1
    )


def batch(given: Given) -> Fate:
    """Prompts of one generation round."""
    completions = _completions(given)
    samples = given.source["num_generations"]
    note = f"{completions} completions / {samples}"
    if completions < samples:
        return refused(f"{note}: less than one group; set buffer.groups_per_step")
    fate = given.into(completions // samples, note)
    if "num_processes" in given.source or given.source.get("generation_batch_size"):
        return fate
    return refused(f"{note}, for one process: add num_processes=GPUS", fate.settings)


def minibatches(given: Given) -> Fate:
    """The optimizer steps of one generation round."""
    return given.into(_updates(given), "completions / those of one optimizer step")


def steps(given: Given) -> Fate:
    """TRL counts optimizer steps, this project batches."""
    each = _updates(given) * given.source["num_iterations"]
    if 0 < given.value < 1:
        return refused(f"a share of all steps: set {given.rule.to[0]}")
    return given.into(-int(-given.value // each), f"{given.value} optimizer steps / {each} a batch")


def policy_loss(given: Given) -> Fate:
    """The loss, its ratio, its bounds and the mean."""
    source = given.source
    settings: Settings = dict(given.rule.cases.get(given.value, {}))
    if not settings:
        return refused(f"{given.value} has no counterpart; see {_LOSS}")
    low = source["epsilon"]
    high = source.get("epsilon_high") or source["epsilon"]
    if settings.setdefault(_LOSS, "ppo") == "cispo":
        # TRL bounds the ratio itself, this project its distance from 1.
        return translated({**settings, f"{_LOSS}.clip_low": None, f"{_LOSS}.clip_high": high - 1})
    if source["importance_sampling_level"] == "sequence":
        if settings[_LOSS] != "ppo":
            return refused(f"{given.value} has a ratio per token")
        settings[_LOSS] = "gspo"
    if settings[_LOSS] in ("ppo", "gspo"):
        settings |= {f"{_LOSS}.clip_low": low, f"{_LOSS}.clip_high": high}
        settings[f"{_LOSS}.clip_dual"] = source.get("delta")
    return translated(settings)


def correction(given: Given) -> Fate:
    """The importance sampling of the engine's log-probs, which TRL does with vLLM only."""
    source = given.source
    path = given.rule.to[0]
    is_off = not (source["use_vllm"] and source[f"{_IS}_correction"])
    if is_off or source["loss_type"] == "vespo":
        return given.into("none", "no behavior weight")
    level, _, action = given.value.partition("_")
    lower = source.get(f"{_IS}_clip_min")
    upper = source.get(f"{_IS}_cap") or source[f"{_IS}_clip_max"]
    settings = {path: f"{level}_{_CORRECTIONS[action]}", f"{path}.max": upper}
    if action == "mask":
        # Without a lower bound one that no weight reaches.
        settings[f"{path}.min"] = lower or 1e-14
    if lower and action == "truncate":
        return refused("a truncated weight has no lower bound here", settings)
    if level == "token" and source["importance_sampling_level"] == "sequence":
        return refused(TOKEN_WEIGHTS, settings)
    return translated(settings)


def kl(given: Given) -> Fate:
    """The KL in the loss."""
    source = given.source
    path = given.rule.to[0]
    if not given.value:
        return given.into("none")
    settings = {path: "loss", f"{path}.coef": given.value, f"{path}.estimator": "k3"}
    if source["use_bias_correction_kl"]:
        return refused("the estimate of the KL has no ratio as a factor here", settings)
    if source["use_vllm"] and source[f"{_IS}_correction"]:
        return refused("the KL has the behavior weight here, not there", settings)
    return translated(settings)
