"""Rules that several source systems share and that depend on more than one key."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from async_rl.launchers.migration.rules import Fate, Given, Settings, refused, same, translated

# AReaL writes "all tokens" as a number above any vocabulary.
_FULL_TOP_K = 1_000_000
# AReaL's default, which means no limit.
_NO_BUDGET = 1e9
_FORWARD_BUDGETS = (
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
    "critic_inf.mb_spec.max_tokens_per_mb",
    "ref_inf.mb_spec.max_tokens_per_mb",
    "ref.mb_spec.max_tokens_per_mb",
)
_STEPS = (
    "exp_ctrl.benchmark_steps",
    "trainer.total_training_steps",
    "total_train_steps",
    "max_steps",
)


def warmup_share(given: Given) -> Fate:
    """Turn a share of all steps into a number of steps, if the source says how many there are."""
    path = given.rule.targets[0]
    value = given.value
    if not value or value < 0:
        return given.into(0)
    # The sources compute a share from their own number of steps, which may follow from the data.
    steps = next((count for count in map(given.source.get, _STEPS) if _is_count(count)), None)
    if steps is None:
        problem = "a share of a number of steps that the file does not name"
        return refused(f"{problem}; set {path}={value:g} x num_steps")
    return given.into(round(value * steps), f"{value:g} x {steps}")


def epochs(given: Given) -> Fate:
    """Translate the number of epochs, unless the file names a number of steps."""
    for key in (*_STEPS, "rollout.total_rollout_steps"):
        if _is_count(given.source.get(key)):
            return same(f"{key} is given")
    return translated({"num_steps": None, "data.epochs": given.value})


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value > 0


def several_machines(given: Given) -> Fate:
    """Translate the number of machines: more than one form a Ray cluster of machines with GPUs."""
    # One machine needs no cluster.
    if given.value == 1:
        return same("one machine")
    gpus = given.sibling("n_gpus_per_node", 8)
    settings = {"launcher": "ray", "launcher.nodes": given.value, "launcher.gpus_per_node": gpus}
    return translated(settings, f"ray start on {given.value} machines")


def halves(gpus: int, width: int) -> Fate:
    """Divide GPUs that the source used for both: half generate in engines of `width`, half
    train."""
    if gpus < 2:
        return refused(f"generation and training use separate GPUs: 2 or more, not {gpus}")
    ranks = max(1, gpus // 2)
    settings = engines(gpus - ranks, width) | learners(ranks)
    return translated(settings, "half for generation, half for training")


def engines(gpus: int, width: int) -> Settings:
    """Settings of generators that use this many GPUs, `width` for each engine."""
    return {"generators.count": max(1, gpus // width), "generators.gpus_each": width}


def learners(gpus: int) -> Settings:
    """Settings of learner ranks with a GPU each."""
    return {"learner.ranks": max(1, gpus), "learner.gpus_each": 1}


def betas(given: Given) -> Fate:
    """Join AdamW's two decays, which are two keys of the source that end in 1 and 2."""
    name = given.key.rpartition(".")[2][:-1]
    return given.into([given.sibling(f"{name}1", 0.9), given.sibling(f"{name}2", 0.999)])


def data_files(given: Given) -> Fate:
    """Files are translated; the name of a data set on a hub names no files."""
    files = [given.value] if isinstance(given.value, str) else list(given.value)
    if all(re.search(r"\.(jsonl?|parquet)$|[*]|://", name) for name in files):
        return given.into(files)
    path = given.rule.targets[0]
    return refused(f"not the name of a file: download the rows and set {path}=[...]")


def lora_targets(given: Given) -> Fate:
    """The layers with an adapter: names, or all linear ones."""
    # The output head has no adapter in this project either.
    if given.value in (None, [], "all-linear", ["all-linear"]):
        return given.into([], "all linear layers except the output head")
    if not isinstance(given.value, list):
        return refused("a pattern of names: list them in model.lora.targets")
    return given.into(given.value)


def token_budget(given: Given, path: str, keys: Sequence[str]) -> Fate:
    """The smallest of the budgets that a source has for calls with one setting."""
    # One setting serves these calls, so it must fit into the memory of each.
    budget = min(filter(None, (given.value, *map(given.source.get, keys))), default=_NO_BUDGET)
    if budget >= _NO_BUDGET:
        return same(f"a pass has {path} tokens")
    return translated({path: budget}, "the smallest budget of these calls")


def forward_budget(given: Given) -> Fate:
    """The budget of the passes without a gradient."""
    return token_budget(given, "learner.forward_budget_tokens", _FORWARD_BUDGETS)


def top_k(given: Given) -> Fate:
    """Refuse every support but the full one."""
    if given.value < 0 or given.value >= _FULL_TOP_K:
        return same("the full support")
    return refused("log-probs would cover another support than the learner's; set -1")


def to_wandb(project: Any) -> Fate:
    """Send the metrics to Weights & Biases too, if it is installed."""
    # A setting that the launch then refuses would not help.
    if find_spec("wandb") is None:
        remedy = f"pip install 'async-rl[wandb]' and set monitoring.wandb={project}"
        return refused(f"wandb is not installed here; {remedy}")
    return translated({"monitoring.wandb": str(project)})
