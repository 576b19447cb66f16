"""The rules of verl's configurations that depend on more than one key; see verl.yaml."""

from __future__ import annotations

import math

import msgspec

from async_rl.launchers.migration.rules import Fate, Given, Settings, refused, same, translated
from async_rl.launchers.migration.shared import engines, halves, learners, to_wandb

_ACTOR = "actor_rollout_ref.actor"
_OVERRIDES = "actor_rollout_ref.model.override_config."
_ROLLOUT = "actor_rollout_ref.rollout"
_REQUIRED = "async_training.require_batches"
_CORRECTIONS = {None: "none", "token": "token_tis", "sequence": "sequence_tis"}
_KL = {"abs": "abs", "mse": "k2", "k2": "k2", "full": "full"}
_ADVANTAGES = (
    "gae",
    "grpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
)


def _is_async(given: Given) -> bool:
    """Return whether the file is one of the fully asynchronous trainer."""
    return _REQUIRED in given.source


def _batch(given: Given) -> int:
    """The prompts of one optimizer batch."""
    # The asynchronous trainer has no train_batch_size.
    if _is_async(given):
        return int(given.source[f"{_ACTOR}.ppo_mini_batch_size"] * given.source[_REQUIRED])
    return int(given.source.get("data.train_batch_size", 1024))


def train_batch_size(given: Given) -> Fate:
    """The prompts of a step: one optimizer batch, or those between two requests for data."""
    if _is_async(given):
        note = f"ppo_mini_batch_size x {_REQUIRED}"
        return given.into(_batch(given), note)
    return given.into(given.value)


def gpus(given: Given) -> Fate:
    """The GPUs of one machine, which the asynchronous trainer uses for training only."""
    width = given.source.get(f"{_ROLLOUT}.tensor_model_parallel_size", 1)
    gpus = given.value * given.source.get("trainer.nnodes", 1)
    if not _is_async(given):
        return halves(gpus, width)
    return translated(learners(gpus), "all train; rollout.n_gpus_per_node generate")


def rollout_gpus(given: Given) -> Fate:
    """The GPUs of the asynchronous trainer's engines."""
    width = given.source.get(f"{_ROLLOUT}.tensor_model_parallel_size", 1)
    settings = engines(given.value * given.sibling("nnodes", 1), width)
    return translated(settings, "engines on separate GPUs")


def staleness(given: Given) -> Fate:
    """The source lets (1 + threshold) x trigger batches be generated between two pushes."""
    trigger = given.sibling("trigger_parameter_sync_step", 4)
    # A small amount keeps 1.1 x 10 = 11.000000000000002 at 11.
    bound = max(math.ceil((1 + given.value) * trigger - 1e-9) - 1, 0)
    return given.into(bound, f"(1 + {given.value}) x {trigger} batches ahead, less the one in use")


def rollout_steps(given: Given) -> Fate:
    """A number of prompts becomes a number of steps."""
    if given.value is None:
        return same("trainer.total_epochs decides")
    batch = _batch(given)
    return given.into(max(given.value // batch, 1), f"{given.value} prompts / {batch} a step")


def correction(given: Given) -> Fate:
    """The importance sampling of the rollout's log-probs."""
    if given.sibling("bypass_mode", False):
        return same("bypass_mode=true: the ratio itself is to the behavior policy")
    if given.value not in _CORRECTIONS:
        return refused("see algorithm.policy_loss.correction")
    return given.into(_CORRECTIONS[given.value])


def aggregation(given: Given) -> Fate:
    """The mean or sum over tokens and sequences."""
    names = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}
    if given.value in names:
        return given.into(names[given.value])
    if given.value not in ("seq-mean-token-sum", "seq-mean-token-sum-norm"):
        return refused(f"{given.value} has no counterpart; see algorithm.aggregation")
    settings: Settings = {"algorithm.aggregation": "sequence_sum"}
    if given.value == "seq-mean-token-sum":
        settings["algorithm.aggregation.tokens"] = 1
    elif given.sibling("loss_scale_factor", None):
        settings["algorithm.aggregation.tokens"] = given.sibling("loss_scale_factor", None)
    return translated(settings, "sums over a constant")


def engine_arguments(given: Given) -> Fate:
    """Refuse arguments of an engine, which may be of another version here."""
    name = given.key.rpartition(".")[2]
    return refused(f"set generation.vllm.extra=[{name}={given.value}] if the installed vLLM has it")


def validation_before(given: Given) -> Fate:
    """An evaluation before the first step goes with evaluation at all."""
    if given.source.get("trainer.test_freq", -1) > 0:
        if given.value:
            return same("the first evaluation is before the first step")
        return refused("the first evaluation is always before the first step")
    if not given.value:
        return same("nothing is evaluated")
    return refused("evaluation.every_steps=0 never evaluates; set it to num_steps")


def logger(given: Given) -> Fate:
    """The sinks of metrics that exist here."""
    listed = [given.value] if isinstance(given.value, str) else given.value
    names = ["wandb" if name == "tracking" else str(name) for name in listed]
    # Names of loggers that have no counterpart.
    others = [name for name in names if name not in ("console", "tensorboard", "wandb")]
    reasons = []
    settings: Settings = {}
    if "wandb" in names:
        wandb = to_wandb(given.source.get("trainer.project_name", "verl_examples"))
        settings.update(wandb.settings)
        if wandb.reason:
            reasons.append(wandb.reason)
    if others:
        reasons.append(f"{', '.join(others)}: TensorBoard replaces it")
    # Metrics of a logger without counterpart should stay visible somewhere.
    has_board = "tensorboard" in names or bool(reasons)
    settings["monitoring.tensorboard_port"] = 0 if has_board else None
    if reasons:
        return Fate("refused", "; ".join(reasons), settings)
    return translated(settings, "the terminal always shows progress")


def advantage(given: Given) -> Fate:
    """The estimator, GRPO without its division under the name that it has here."""
    by_std = given.source.get("algorithm.norm_adv_by_std_in_grpo", True)
    if given.value == "grpo" and not by_std:
        note = "norm_adv_by_std_in_grpo=false"
        return translated({"algorithm.advantage": "dr_grpo"}, note)
    if given.value in _ADVANTAGES:
        return translated({"algorithm.advantage": given.value})
    return refused(f"{given.value} has no counterpart; see algorithm.advantage")


def override_config(given: Given) -> Fate:
    """Translate every field together, because one setting contains them all."""
    listed = [
        f"{key.removeprefix(_OVERRIDES)}={msgspec.json.encode(value).decode()}"
        for key, value in given.source.items()
        if key.startswith(_OVERRIDES)
    ]
    return translated({"model.override_config": listed})


def minibatches(given: Given) -> Fate:
    """The prompts of a minibatch become the number of minibatches."""
    batch = _batch(given)
    # Our minibatches are a number, so their sizes are equal.
    if batch % given.value:
        problem = f"does not divide data.train_batch_size={batch}"
        return refused(f"{problem}; minibatches must have equal sizes")
    return given.into(batch // given.value, f"{batch} / {given.value}")


def offload(given: Given) -> Fate:
    """Three switches become one setting."""
    if given.sibling("param_offload", False) or given.sibling("grad_offload", False):
        note = "parameters and gradients leave the GPU together"
        return translated({"learner.offload": "parameters"}, note)
    offload = "optimizer" if given.sibling("optimizer_offload", False) else "none"
    return translated({"learner.offload": offload})


def _is_kl_in_reward(given: Given) -> bool:
    """The first releases always had it there, and only they had this key of the reward model."""
    # No later release has this key.
    is_first = "reward_model.model.input_tokenizer" in given.source
    return bool(given.source.get("algorithm.use_kl_in_reward", is_first))


def kl_in_reward(given: Given) -> Fate:
    """The KL in the reward, if it is there."""
    coef = given.source.get("algorithm.kl_ctrl.kl_coef", 0.001)
    if not _is_kl_in_reward(given):
        return same("actor.use_kl_loss decides")
    if coef:
        return translated({"algorithm.kl": "reward", "algorithm.kl.coef": coef})
    return translated({"algorithm.kl": "none"}, "no KL term")


def kl_loss(given: Given) -> Fate:
    """The KL in the loss, unless it is in the reward."""
    in_reward = _is_kl_in_reward(given)
    # This project has one KL term.
    if given.value and in_reward:
        return refused("KL both in the reward and in the loss; the one in the reward is kept")
    coef = given.sibling("kl_loss_coef", 0.001)
    estimate = given.sibling("kl_loss_type", "low_var_kl")
    if given.value and coef and estimate in ("kl", "k1"):
        reason = "in the loss this estimate has no expected gradient; set it to low_var_kl"
        return refused(f"kl_loss_type={estimate}: {reason}")
    if given.value and coef:
        settings = {
            "algorithm.kl": "loss",
            "algorithm.kl.coef": coef,
            "algorithm.kl.estimator": _KL.get(estimate, "k3"),
        }
        return translated(settings)
    if in_reward:
        return same("the KL is in the reward")
    return translated({"algorithm.kl": "none"}, "no KL term")


def evaluation_samples(given: Given) -> Fate:
    """Several samples of a prompt, unless they are greedy."""
    if given.value == 1 or given.sibling("do_sample", False):
        return translated({"evaluation.num_samples": given.value})
    return refused("all greedy samples of a prompt are equal; set do_sample=true")
