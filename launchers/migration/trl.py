"""The rules of TRL's GRPOConfig that depend on more than one key; see trl.yaml."""

from __future__ import annotations

from async_rl.launchers.migration.rules import Fate, Given, refused, same, translated
from async_rl.launchers.migration.shared import to_wandb


def batch(given: Given) -> Fate:
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
        return refused(f"{note}: less than one group; set buffer.groups_per_step")
    return given.into(completions // samples, note)


def minibatches(given: Given) -> Fate:
    """The optimizer steps of one generation round."""
    accumulated = given.sibling("gradient_accumulation_steps", 1)
    rounds = given.sibling("steps_per_generation", None) or accumulated
    return given.into(max(rounds // accumulated, 1), "steps_per_generation / accumulation steps")


def warmup_steps(given: Given) -> Fate:
    """A number of steps; below 1 it would be a share of them."""
    # Below 1 it is a share of all steps.
    if 0 < given.value < 1:
        return refused("a share of num_steps: set learner.optimizer.warmup_steps")
    return given.into(int(given.value))


def save(given: Given) -> Fate:
    """Checkpoints every so many steps, if they are saved by steps."""
    if given.sibling("save_strategy", "steps") != "steps" or given.value < 1:
        return same("save_strategy decides")
    return given.into(int(given.value))


def evaluation(given: Given) -> Fate:
    """Evaluate every so many steps, if evaluation is by steps."""
    if given.sibling("eval_strategy", "no") == "no":
        return translated({"evaluation.every_steps": 0}, "eval_strategy=no")
    if given.value is None:
        return refused("eval_strategy without eval_steps: set evaluation.every_steps")
    return given.into(int(given.value))


def report_to(given: Given) -> Fate:
    """The sinks of metrics that exist here."""
    names = [given.value] if isinstance(given.value, str) else given.value or []
    if "wandb" in names or "all" in names:
        return to_wandb(given.sibling("project", "huggingface"))
    return same("metrics go to the terminal, a file and TensorBoard")


def weighted_kl(given: Given) -> Fate:
    """Refuse an importance weight of the KL's estimate."""
    if not given.sibling("beta", 0.0):
        return same("no KL term")
    if given.value:
        return refused("the estimate of the KL has no importance weight here")
    return same("the estimate of the KL has no importance weight")
