"""The rules of TRL's GRPOConfig that depend on more than one key; see trl.yaml."""

from __future__ import annotations

from collections.abc import Mapping

from async_rl.launchers.migration.rules import Fate, Function, Given, Settings
from async_rl.launchers.migration.shared import to_wandb


def _batch(given: Given) -> Fate:
    """Prompts of one generation round; the file names no GPUs."""
    samples = given.sibling("num_generations", 8)
    completions = given.sibling("generation_batch_size", None)
    note = f"{completions} completions / {samples}"
    if completions is None:
        rounds = given.sibling("steps_per_generation", None) or given.sibling(
            "gradient_accumulation_steps", 1
        )
        completions = given.sibling("per_device_train_batch_size", 8) * rounds
        note = f"{completions} completions / {samples} on one GPU; multiply by the number of GPUs"
    if completions < samples:
        return Fate("refused", f"{note}: less than one group; set buffer.groups_per_step")
    return given.into(completions // samples, note)


def _minibatches(given: Given) -> Fate:
    accumulated = given.sibling("gradient_accumulation_steps", 1)
    rounds = given.sibling("steps_per_generation", None) or accumulated
    return given.into(max(rounds // accumulated, 1), "steps_per_generation / accumulation steps")


def _loss(given: Given) -> Fate:
    tokens = given.sibling("max_completion_length", 512)
    by_name: dict[str, Settings] = {
        "grpo": {"algorithm.aggregation": "sequence_mean"},
        "bnpo": {"algorithm.aggregation": "token_mean"},
        "dapo": {"algorithm.aggregation": "token_mean"},
        "dr_grpo": {
            "algorithm.aggregation": "sequence_sum",
            "algorithm.aggregation.tokens": tokens,
        },
        "sapo": {
            "algorithm.policy_loss": "plugin",
            "algorithm.policy_loss.fn": "async_rl.examples.losses.sapo:loss",
            "algorithm.aggregation": "sequence_mean",
        },
        "vespo": {"algorithm.policy_loss": "vespo"},
        "cispo": {"algorithm.policy_loss": "cispo", "algorithm.aggregation": "token_mean"},
    }
    if given.value not in by_name:
        return Fate("refused", f"{given.value} has no counterpart; see algorithm.policy_loss")
    return Fate("translated", settings=by_name[given.value])


def _level(given: Given) -> Fate:
    if given.value == "token":
        return Fate("defaulted", "algorithm.policy_loss=ppo has a ratio per token")
    if given.value != "sequence":
        return Fate("refused", "token or sequence")
    return Fate("translated", settings={"algorithm.policy_loss": "gspo"})


def _clip(given: Given) -> Fate:
    high = given.sibling("epsilon_high", None) or given.value
    settings = {
        "algorithm.policy_loss.clip_low": given.value,
        "algorithm.policy_loss.clip_high": high,
    }
    return Fate("translated", settings=settings)


def _steps(given: Given) -> Fate:
    if given.value <= 0:
        return Fate("defaulted", "num_train_epochs decides")
    return given.into(given.value)


def _warmup_steps(given: Given) -> Fate:
    # Below 1 it is a share of all steps.
    if 0 < given.value < 1:
        return Fate("refused", "a share of num_steps: set learner.optimizer.warmup_steps")
    return given.into(int(given.value))


def _save(given: Given) -> Fate:
    if given.sibling("save_strategy", "steps") != "steps" or given.value < 1:
        return Fate("defaulted", "save_strategy decides")
    return given.into(int(given.value))


def _evaluation(given: Given) -> Fate:
    if given.sibling("eval_strategy", "no") == "no":
        return Fate("translated", "eval_strategy=no", {"evaluation.every_steps": 0})
    if given.value is None:
        return Fate("refused", "eval_strategy without eval_steps: set evaluation.every_steps")
    return given.into(int(given.value))


def _report_to(given: Given) -> Fate:
    names = [given.value] if isinstance(given.value, str) else given.value or []
    if "wandb" in names or "all" in names:
        return to_wandb(given.sibling("project", "huggingface"))
    return Fate("defaulted", "metrics go to the terminal, a file and TensorBoard")


def _weighted_kl(given: Given) -> Fate:
    if not given.sibling("beta", 0.0):
        return Fate("defaulted", "no KL term")
    if given.value:
        return Fate("refused", "the estimate of the KL has no importance weight here")
    return Fate("defaulted", "the estimate of the KL has no importance weight")


FUNCTIONS: Mapping[str, Function] = {
    "batch": _batch,
    "minibatches": _minibatches,
    "loss": _loss,
    "level": _level,
    "clip": _clip,
    "steps": _steps,
    "warmup_steps": _warmup_steps,
    "save": _save,
    "evaluation": _evaluation,
    "report_to": _report_to,
    "weighted_kl": _weighted_kl,
}
