"""The rules of verl's configurations that depend on more than one key; see verl.yaml.

The table completes every source with the defaults of its release, so the keys below exist.
"""

import math

from async_rl.launchers.migration.rules import Fate, Given, refused, translated
from async_rl.launchers.migration.shared import engines, halves, learners

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_REQUIRED = "async_training.require_batches"
_IS = "algorithm.rollout_correction.rollout_is"
_BYPASS = "algorithm.rollout_correction.bypass_mode"
_ESTIMATORS = {"low_var_kl": "k3", "k3": "k3", "abs": "abs", "mse": "k2", "k2": "k2"}


def _batch(given: Given) -> int:
    """The prompts of one batch of the asynchronous trainer, which has no train_batch_size."""
    return int(given.source[f"{_ACTOR}.ppo_mini_batch_size"] * given.source[_REQUIRED])


def async_batch(given: Given) -> Fate:
    """The prompts that the trainer takes at once."""
    return given.into(_batch(given), f"ppo_mini_batch_size x {_REQUIRED}")


def gpus(given: Given) -> Fate:
    """The GPUs of one machine, which the asynchronous trainer uses for training only."""
    gpus = given.value * given.source["trainer.nnodes"]
    if _REQUIRED in given.source:
        return translated(learners(gpus), "all train; rollout.n_gpus_per_node generate")
    return halves(gpus, given.source[f"{_ROLLOUT}.tensor_model_parallel_size"])


def rollout_gpus(given: Given) -> Fate:
    """The GPUs of the asynchronous trainer's engines."""
    width = given.source[f"{_ROLLOUT}.tensor_model_parallel_size"]
    return translated(engines(given.value * given.source["rollout.nnodes"], width))


def staleness(given: Given) -> Fate:
    """The source lets (1 + threshold) x trigger batches be generated between two pushes."""
    trigger = given.source["async_training.trigger_parameter_sync_step"]
    # A small amount keeps 1.1 x 10 = 11.000000000000002 at 11.
    bound = max(math.ceil((1 + given.value) * trigger - 1e-9) - 1, 0)
    return given.into(bound, f"(1 + {given.value}) x {trigger} batches ahead, less the one in use")


def rollout_steps(given: Given) -> Fate:
    """A number of prompts becomes a number of steps."""
    batch = _batch(given)
    return given.into(max(given.value // batch, 1), f"{given.value} prompts / {batch} a step")


def policy_loss(given: Given) -> Fate:
    """The loss, and the ratio that it bounds."""
    settings = given.rule.cases.get(given.value)
    if not settings:
        return refused(f"{given.value} has no counterpart; see algorithm.policy_loss")
    if not given.source[_BYPASS]:
        return translated(settings)
    if given.value != "vanilla":
        return refused(f"{_BYPASS} is only possible with loss_mode=vanilla")
    return given.into("ppo_vanilla", "the ratio is to the behavior policy")


def aggregation(given: Given) -> Fate:
    """The mean of the loss, which gspo and sapo choose themselves."""
    source = given.source
    settings = given.rule.cases.get(given.value)
    if source[f"{_ACTOR}.policy_loss.loss_mode"] not in ("gspo", "sapo"):
        if not settings:
            return refused("see algorithm.aggregation")
        return translated(settings, "a mean over sequences is one over all of the minibatch")
    mean = {"algorithm.aggregation": "sequence_mean"}
    has_terms = source[f"{_ACTOR}.entropy_coeff"] or source[f"{_ACTOR}.use_kl_loss"]
    if has_terms and settings != mean:
        return refused("only of entropy and KL there; the loss has sequence_mean", mean)
    return translated(mean, "gspo and sapo are always means over sequences")


def correction(given: Given) -> Fate:
    """The importance sampling of the rollout's log-probs."""
    path = given.rule.to[0]
    if given.value is None or given.source[_BYPASS]:
        return given.into("none", "no behavior weight, or only in the ratio")
    lower, _, upper = str(given.source[f"{_IS}_threshold"]).rpartition("_")
    if not lower:
        return translated({path: f"{given.value}_tis", f"{path}.max": float(upper)})
    bounds = {f"{path}.min": float(lower), f"{path}.max": float(upper)}
    return translated({path: f"{given.value}_mis", **bounds}, "outside both bounds it is 0")


def minibatches(given: Given) -> Fate:
    """The prompts of a minibatch become the number of minibatches."""
    required = given.source.get(_REQUIRED)
    if required:
        return given.into(required, _REQUIRED)
    batch = given.source["data.train_batch_size"]
    # Our minibatches are a number, so their sizes are equal.
    if batch % given.value:
        return refused(f"does not divide data.train_batch_size={batch} into equal minibatches")
    return given.into(batch // given.value, f"{batch} / {given.value}")


def kl(given: Given) -> Fate:
    """The one KL term, in the reward or in the loss."""
    path = given.rule.to[0]
    source = given.source
    in_loss = source[f"{_ACTOR}.use_kl_loss"]
    # Before 0.4, which had no dual clip, a KL in the loss replaced that in the reward.
    in_reward = given.value and not (in_loss and not source[f"{_ACTOR}.clip_ratio_c"])
    coef = source["algorithm.kl_ctrl.kl_coef" if in_reward else f"{_ACTOR}.kl_loss_coef"]
    if not coef or not (in_reward or in_loss):
        return given.into("none")
    if in_reward:
        settings = {path: "reward", f"{path}.coef": coef}
        problem = "KL in the loss too; that in the reward is kept" if in_loss else ""
    else:
        estimator = _ESTIMATORS.get(source[f"{_ACTOR}.kl_loss_type"])
        settings = {path: "loss", f"{path}.coef": coef, f"{path}.estimator": estimator or "k3"}
        problem = "" if estimator else "kl_loss_type has no counterpart: k3 in its place"
        if source[_IS] is not None:
            problem = "the KL has the behavior weight here, not there"
    return refused(problem, settings) if problem else translated(settings)
