"""The rules of TRL's GRPOConfig that depend on more than one key; see trl.yaml."""

from __future__ import annotations

from collections.abc import Mapping

from async_rl.launchers.migration.rules import Fate, Function, Given
from async_rl.launchers.migration.shared import to_wandb


def _batch(given: Given) -> Fate:
    """Prompts of one generation round; the file names no GPUs."""
    samples = given.sibling("num_generations", 8)
    completions = given.sibling("generation_batch_size", None)
    note = f"{completions} completions / {samples}"
    if completions is None:
        # TRL takes one generation round per accumulated step if the key is missing.
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
    "warmup_steps": _warmup_steps,
    "save": _save,
    "evaluation": _evaluation,
    "report_to": _report_to,
    "weighted_kl": _weighted_kl,
}
