"""The rules of verl's `ppo_trainer.yaml` that depend on more than one key; see verl.yaml."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from async_rl.launchers.migration.rules import Fate, Function, Given, Settings, to_wandb

_ACTOR = "actor_rollout_ref.actor"
_OVERRIDES = "actor_rollout_ref.model.override_config."
_KL = {"abs": "abs", "mse": "k2", "k2": "k2", "full": "full"}
_ADVANTAGES = (
    "gae",
    "grpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
)


def _gpus(given: Given) -> Fate:
    width = given.source.get("actor_rollout_ref.rollout.tensor_model_parallel_size", 1)
    gpus = given.value * given.source.get("trainer.nnodes", 1)
    if gpus < 2:
        return Fate(
            "refused",
            f"generation and training use separate GPUs: 2 or more, not {gpus}",
        )
    ranks = max(1, gpus // 2)
    settings: Settings = {
        "generators.count": max(1, (gpus - ranks) // width),
        "generators.gpus_each": width,
        "learner.ranks": ranks,
        "learner.gpus_each": 1,
    }
    return Fate(
        "translated",
        "half for generation, half for training",
        settings,
    )


def _logger(given: Given) -> Fate:
    listed = [given.value] if isinstance(given.value, str) else given.value
    names = ["wandb" if name == "tracking" else str(name) for name in listed]
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
        return Fate(
            "refused",
            "; ".join(reasons),
            settings,
        )
    return Fate(
        "translated",
        "the terminal always shows progress",
        settings,
    )


def _advantage(given: Given) -> Fate:
    by_std = given.source.get("algorithm.norm_adv_by_std_in_grpo", True)
    if given.value == "grpo" and not by_std:
        note = "norm_adv_by_std_in_grpo=false"
        return Fate(
            "translated",
            note,
            {"algorithm.advantage": "dr_grpo"},
        )
    if given.value in _ADVANTAGES:
        return Fate("translated", settings={"algorithm.advantage": given.value})
    return Fate("refused", f"{given.value} has no counterpart; see algorithm.advantage")


def _override_config(given: Given) -> Fate:
    """Translate every field together, because one setting contains them all."""
    listed = [
        f"{key.removeprefix(_OVERRIDES)}={msgspec.json.encode(value).decode()}"
        for key, value in given.source.items()
        if key.startswith(_OVERRIDES)
    ]
    return Fate("translated", settings={"model.override_config": listed})


def _minibatches(given: Given) -> Fate:
    batch = given.source.get("data.train_batch_size", 1024)
    # Our minibatches are a number, so their sizes are equal.
    if batch % given.value:
        problem = f"does not divide data.train_batch_size={batch}"
        return Fate("refused", f"{problem}; minibatches must have equal sizes")
    count = batch // given.value
    return Fate(
        "translated",
        f"{batch} / {given.value}",
        {"learner.minibatches": count},
    )


def _shuffle(given: Given) -> Fate:
    batch = given.source.get("data.train_batch_size", 1024)
    if given.source.get(f"{_ACTOR}.ppo_mini_batch_size") == batch:
        return Fate(
            "defaulted",
            "one minibatch contains everything, so the order has no effect",
        )
    return Fate("translated", settings={"learner.shuffle": given.value})


def _clip_ratio(given: Given) -> Fate:
    settings = {
        "algorithm.policy_loss.clip_low": given.sibling("clip_ratio_low", given.value),
        "algorithm.policy_loss.clip_high": given.sibling("clip_ratio_high", given.value),
    }
    return Fate("translated", settings=settings)


def _warmup_steps(given: Given) -> Fate:
    if given.value is None or given.value < 0:
        return Fate("defaulted", "lr_warmup_steps_ratio decides")
    return Fate("translated", settings={given.rule.targets[0]: given.value})


def _offload(given: Given) -> Fate:
    if given.sibling("param_offload", False) or given.sibling("grad_offload", False):
        note = "parameters and gradients leave the GPU together"
        return Fate(
            "translated",
            note,
            {"learner.offload": "parameters"},
        )
    offload = "optimizer" if given.sibling("optimizer_offload", False) else "none"
    return Fate("translated", settings={"learner.offload": offload})


def _kl_in_reward(given: Given) -> Fate:
    coef = given.source.get("algorithm.kl_ctrl.kl_coef", 0.001)
    if not given.source.get("algorithm.use_kl_in_reward", True):
        return Fate("defaulted", "actor.use_kl_loss decides")
    if coef:
        return Fate(
            "translated",
            settings={"algorithm.kl": "reward", "algorithm.kl.coef": coef},
        )
    return Fate(
        "translated",
        "no KL term",
        {"algorithm.kl": "none"},
    )


def _kl_loss(given: Given) -> Fate:
    in_reward = given.source.get("algorithm.use_kl_in_reward", True)
    if given.value and in_reward:
        return Fate(
            "refused", "KL both in the reward and in the loss; the one in the reward is kept"
        )
    coef = given.sibling("kl_loss_coef", 0.001)
    estimate = given.sibling("kl_loss_type", "low_var_kl")
    if given.value and coef and estimate in ("kl", "k1"):
        reason = "in the loss this estimate has no expected gradient; set it to low_var_kl"
        return Fate("refused", f"kl_loss_type={estimate}: {reason}")
    if given.value and coef:
        settings = {
            "algorithm.kl": "loss",
            "algorithm.kl.coef": coef,
            "algorithm.kl.estimator": _KL.get(estimate, "k3"),
        }
        return Fate("translated", settings=settings)
    if in_reward:
        return Fate("defaulted", "the KL is in the reward")
    return Fate(
        "translated",
        "no KL term",
        {"algorithm.kl": "none"},
    )


def _evaluation_samples(given: Given) -> Fate:
    if given.value == 1 or given.sibling("do_sample", False):
        return Fate("translated", settings={"evaluation.num_samples": given.value})
    return Fate("refused", "all greedy samples of a prompt are equal; set do_sample=true")


FUNCTIONS: Mapping[str, Function] = {
    "gpus": _gpus,
    "logger": _logger,
    "advantage": _advantage,
    "override_config": _override_config,
    "minibatches": _minibatches,
    "shuffle": _shuffle,
    "clip_ratio": _clip_ratio,
    "warmup_steps": _warmup_steps,
    "offload": _offload,
    "kl_in_reward": _kl_in_reward,
    "kl_loss": _kl_loss,
    "evaluation_samples": _evaluation_samples,
}
