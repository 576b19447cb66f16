"""Rules that several source systems share and that depend on more than one key."""

import re
from importlib.util import find_spec

from async_rl.core.calls import MOST_KEPT
from async_rl.launchers.migration.rules import Fate, Given, Settings, refused, same, translated

TOKEN_WEIGHTS = "the weight of a token is that of its own gradient, there of the whole ratio's"
"""Of a ratio per sequence: there its gradient is the same at every token."""
_ALL_TOKENS = 1_000_000
"""A larger top_k is a way to write all tokens in AReaL."""


def sampling(given: Given) -> Fate:
    """Translate top_k, top_p and the minimum length together: they are one setting here. Training
    with top_p needs a top_k, which bounds the record of the tokens that are left.
    """
    target = given.rule.to[0]
    top_k = given.sibling("top_k", 0) or 0
    top_p = given.sibling("top_p", 1)
    if not 0 < top_k < _ALL_TOKENS:
        top_k = MOST_KEPT if target == "generation.sampling" and top_p != 1 else 0
    entries = {
        "top_k": top_k,
        "top_p": top_p != 1 and top_p,
        "min_tokens": given.sibling("min_new_tokens", 0),
        "grammar": given.sibling("vllm_structured_outputs_regex", ""),
    }
    return translated({target: [f"{name}={value}" for name, value in entries.items() if value]})


def warmup_share(given: Given) -> Fate:
    """Turn a share of all steps into a number of steps, if the source says how many there are."""
    path = given.rule.to[0]
    value = given.value
    if not value or value < 0:
        return given.into(0)
    # AReaL takes the share of all steps of its epochs, even where fewer are trained.
    steps = given.source.get("trainer.total_training_steps")
    if not isinstance(steps, int) or steps < 1:
        problem = "a share of a number of steps that the file does not name"
        return refused(f"{problem}; set {path}={value:g} x num_steps")
    return given.into(round(value * steps), f"{value:g} x {steps}")


def several_machines(given: Given) -> Fate:
    """Translate the number of machines: more than one form a Ray cluster of machines with GPUs."""
    return translated(
        {
            "launcher": "ray",
            "launcher.nodes": given.value,
            "launcher.gpus_per_node": given.sibling("n_gpus_per_node", 8),
        }
    )


def halves(gpus: int, width: int) -> Fate:
    """Divide GPUs that the source used for both: half generate in engines of `width`, half
    train."""
    if gpus < 2:
        return refused(f"generation and training use separate GPUs: 2 or more, not {gpus}")
    ranks = gpus // 2
    rest = gpus - ranks
    note = f"{gpus} GPUs = {rest} for generation + {ranks} for training"
    if width <= rest:
        return translated(engines(rest, width) | learners(ranks), note)
    problem = f"{note}: no engine of {width}, so engines of 1"
    return refused(problem, engines(rest, 1) | learners(ranks))


def engines(gpus: int, width: int) -> Settings:
    """Settings of generators that use this many GPUs, `width` for each engine."""
    settings = {"generators.count": max(1, gpus // width), "generators.gpus_each": width}
    return {**settings, "generation.vllm.tensor_parallel_size": width}


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
    path = given.rule.to[0]
    return refused(f"not the name of a file: download the rows and set {path}=[...]")


def loggers(given: Given) -> Fate:
    """Weights & Biases, if it is installed; the other trackers have a counterpart here."""
    # A list, the name of one tracker, or AReaL's mode.
    if not re.search("wandb|tracking|online|all", str(given.value)):
        return same("the terminal, a file and TensorBoard have the numbers")
    # A setting that the launch then refuses would not help.
    if find_spec("wandb") is None:
        return refused("wandb is not installed here; pip install 'async-rl[wandb]'")
    project = given.source.get("trainer.project_name") or given.sibling("project", "async_rl")
    return translated({"monitoring.wandb": str(project)})


def schedule(given: Given) -> Fate:
    """The schedule of the learning rate, the nearest one if it is linear."""
    settings = given.rule.cases.get(given.value)
    if settings:
        return translated(settings)
    falling = {"learner.optimizer.schedule": "cosine"}
    return refused(f"{given.value}: a cosine to the same end in its place", falling)
