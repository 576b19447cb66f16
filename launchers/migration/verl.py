"""What becomes of the keys of verl's `ppo_trainer.yaml`: the FSDP form of its first releases and
the generated one of today.

verl shares its GPUs between generation and training; here each has its own, so the GPUs of the
source are split in halves. Used by `async-rl migrate`.
"""

from __future__ import annotations

from typing import Any

from async_rl.launchers.migration.rules import (
    Fate,
    Rule,
    Settings,
    Source,
    choice,
    only,
    same,
    several_machines,
    to,
    to_wandb,
    unless_null,
    when,
)
from async_rl.launchers.migration.verl_models import (
    KL,
    MODEL_RULES,
    TOOLS,
    metadata,
    with_critic,
)

_R = "actor_rollout_ref.rollout"
_ADVANTAGES = {
    "gae": "gae",
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "remax": "remax",
}
IMPLIED = {f"{_R}.n": 1, "trainer.n_gpus_per_node": 8, "trainer.nnodes": 1}


def base(source: Source) -> str:
    """The configuration of ours to build on."""
    return "ppo_code" if source.get("algorithm.adv_estimator", "gae") == "gae" else "grpo_code"


def _gpus(value: Any, source: Source) -> Fate:
    width = source.get(f"{_R}.tensor_model_parallel_size", 1)
    value *= source.get("trainer.nnodes", 1)
    if value < 2:
        return Fate(
            "refused",
            f"generation and training need GPUs of their own, {value} cannot be shared; give at"
            " least 2",
        )
    learner = max(1, value // 2)
    generators = max(1, (value - learner) // width)
    settings: Settings = {
        "generators.count": generators,
        "generators.gpus_each": width,
        "learner.ranks": learner,
        "learner.gpus_each": 1,
    }
    return Fate("translated", "half for generation, half for training", settings)


def _logger(value: Any, source: Source) -> Fate:
    names = [value] if isinstance(value, str) else list(value)
    names = ["wandb" if name == "tracking" else str(name) for name in names]
    others = [name for name in names if name not in ("console", "tensorboard", "wandb")]
    wandb = (
        to_wandb(source.get("trainer.project_name", "verl_examples"))
        if "wandb" in names
        else Fate("translated")
    )
    reasons = [
        wandb.reason,
        f"{', '.join(others)}: there is TensorBoard in its place" if others else "",
    ]
    settings: Settings = {
        "monitoring.tensorboard": "tensorboard" in names or any(reasons),
        **wandb.settings,
    }
    if any(reasons):
        return Fate("refused", "; ".join(filter(None, reasons)), settings)
    return Fate("translated", "the terminal is always told", settings)


def _kl_in_reward(value: Any, source: Source) -> Fate:
    if value:
        return Fate("translated", settings={"algorithm.kl_placement": "reward"})
    return Fate("defaulted", "decided by actor.use_kl_loss")


def _unless_kl_is_off(rule: Rule) -> Rule:
    reason = "without effect: algorithm.use_kl_in_reward=false"
    return lambda value, source: (
        rule(value, source)
        if source.get("algorithm.use_kl_in_reward", True)
        else Fate("defaulted", reason)
    )


_TRUNCATION = choice(
    "data.truncation",
    {name: name for name in ("error", "left", "right", "middle")},
    "error, left, right or middle",
)


def _unless(key: str, rule: Rule) -> Rule:
    return lambda value, source: (
        Fate("defaulted", f"{key}=true decides") if source.get(key) else rule(value, source)
    )


def _advantage(value: Any, source: Source) -> Fate:
    if value == "grpo" and not source.get("algorithm.norm_adv_by_std_in_grpo", True):
        return Fate(
            "translated", "norm_adv_by_std_in_grpo=false", {"algorithm.advantage": "dr_grpo"}
        )
    return choice("algorithm.advantage", _ADVANTAGES, "see algorithm.advantage")(value, source)


def _kl_coef(value: Any, _: Source) -> Fate:
    return Fate(
        "translated", settings={"algorithm.kl_coef": value, "algorithm.kl_placement": "reward"}
    )


def _of_reward_model(rule: Rule) -> Rule:
    return when("reward_model.enable", True, rule, "without effect: reward_model.enable=false")


_DATA: dict[str, Rule] = {
    "data.tokenizer": unless_null(to("data.tokenizer"), "the model's own"),
    "data.train_files": to(
        "data.train_files", by=lambda value: [value] if isinstance(value, str) else list(value)
    ),
    "data.val_files": to(
        "data.val_files", by=lambda value: [value] if isinstance(value, str) else list(value or [])
    ),
    "data.prompt_key": to("data.prompt_key"),
    "data.prompt_id_key": unless_null(
        to("data.id_key"), "the id columns that are known, else the row's number"
    ),
    "data.max_prompt_id_length": same(
        "an id is a field of its prompt, never tokens; data.max_id_length bounds its characters"
    ),
    "data.reward_fn_key": only(
        ("data_source",),
        "the column is data_source",
        "the column is data_source; rename it in the file",
    ),
    "data.max_prompt_length": to("data.max_prompt_tokens"),
    "data.max_response_length": to("data.max_response_tokens"),
    "data.train_batch_size": to("buffer.groups_per_step"),
    "data.val_batch_size": same("every row is evaluated, in no batches"),
    "data.return_raw_input_ids": same("what a reward model reads is always kept"),
    "data.return_raw_chat": same("what a reward model reads is always kept"),
    "data.return_full_prompt": same("the prompt's text is always kept"),
    "data.truncation": _unless("data.filter_overlong_prompts", _TRUNCATION),
    "data.filter_overlong_prompts": lambda value, _: (
        Fate("translated", settings={"data.truncation": "drop"})
        if value
        else Fate("defaulted", "data.truncation decides")
    ),
    "data.shuffle": to("data.shuffle"),
    "data.validation_shuffle": same("every row is evaluated; their order changes nothing"),
    "data.trust_remote_code": only(
        (False,),
        "code of others is not run",
        "set model.trust_remote_code=true if you trust the model",
    ),
    "data.custom_cls.*": only(
        (None,), "no class of one's own", "convert the data to one of the layouts of docs/data.md"
    ),
    "data.sampler.*": only(
        (None,), "each epoch holds every prompt once", "the order is each prompt once per epoch"
    ),
    "data.datagen.*": only((None,), "no data is generated", "data is not generated during a run"),
    "data.apply_chat_template_kwargs": only(
        ({},), "the template as it is", "change the chat template of the tokenizer instead"
    ),
}
for _name in (
    "use_shm",
    "dataloader_num_workers",
    "filter_overlong_prompts_workers",
    "image_key",
    "video_key",
    "return_multi_modal_inputs",
):
    _DATA[f"data.{_name}"] = same(TOOLS)

_REWARD: dict[str, Rule] = {
    "reward_model.enable": lambda value, _: (
        Fate("translated", settings={"reward.fn": "reward_model"})
        if value
        else Fate("defaulted", "rewards come from rules and tests")
    ),
    "reward_model.model.path": _of_reward_model(to("reward.model.path")),
    "reward_model.model.input_tokenizer": _of_reward_model(
        same("the reward model's own tokenizer and template")
    ),
    "reward_model.micro_batch_size": _of_reward_model(
        unless_null(to("reward.model.batch_size"), "reward.model.batch_size")
    ),
    "reward_model.max_length": _of_reward_model(
        unless_null(to("reward.model.max_tokens"), "reward.model.max_tokens")
    ),
    "reward_model.sandbox_fusion.url": only(
        (None,), "our own verifiers run the programs", "our own verifiers run the programs"
    ),
    "reward_model.reward_manager": only(
        ("naive",), "each response is scored by itself", "each response is scored by itself"
    ),
    "reward_model.*": _of_reward_model(
        same("the verifier loads and places the reward model (reward.model)")
    ),
    "custom_reward_function.path": only(
        (None,), "rewards by data_source", "a function of one's own is not carried over"
    ),
    "custom_reward_function.*": same("without effect unless its path is set"),
}

_ALGORITHM: dict[str, Rule] = {
    "algorithm._target_": metadata,
    "algorithm.gamma": to("algorithm.gamma"),
    "algorithm.lam": with_critic(to("algorithm.gae_lambda")),
    "algorithm.adv_estimator": _advantage,
    "algorithm.norm_adv_by_std_in_grpo": same("taken with adv_estimator"),
    "algorithm.use_kl_in_reward": _kl_in_reward,
    "algorithm.kl_penalty": _unless_kl_is_off(
        choice("algorithm.kl_estimator", KL, "kl, abs, mse, low_var_kl or full")
    ),
    "algorithm.kl_ctrl._target_": metadata,
    "algorithm.kl_ctrl.type": _unless_kl_is_off(
        choice("algorithm.kl_controller", {"fixed": "fixed", "adaptive": "adaptive"}, "fixed")
    ),
    "algorithm.kl_ctrl.kl_coef": _unless_kl_is_off(_kl_coef),
    "algorithm.kl_ctrl.horizon": to("algorithm.kl_horizon"),
    "algorithm.kl_ctrl.target_kl": to("algorithm.kl_target"),
    "algorithm.use_pf_ppo": only(
        (False,), "every sample counts once", "samples are not drawn by weight"
    ),
    "algorithm.pf_ppo.*": same("without effect: algorithm.use_pf_ppo=false"),
}

_TRAINER: dict[str, Rule] = {
    "trainer.total_epochs": lambda value, source: (
        Fate("defaulted", "trainer.total_training_steps is given")
        if isinstance(source.get("trainer.total_training_steps"), int)
        else Fate("translated", settings={"num_steps": None, "data.epochs": value})
    ),
    "trainer.total_training_steps": unless_null(to("num_steps"), "trainer.total_epochs decides"),
    "trainer.project_name": same(
        "the project in wandb, taken with trainer.logger; runs lie in output_dir"
    ),
    "trainer.experiment_name": to("run_name"),
    "trainer.logger": _logger,
    "trainer.nnodes": several_machines("trainer.n_gpus_per_node"),
    "trainer.n_gpus_per_node": _gpus,
    "trainer.save_freq": to("checkpoint.every_steps", by=lambda value: max(value, 0)),
    "trainer.test_freq": to("evaluation.every_steps", by=lambda value: max(value, 0)),
    "trainer.critic_warmup": with_critic(to("learner.critic.warmup_steps")),
    "trainer.default_local_dir": to("output_dir"),
    "trainer.default_hdfs_dir": unless_null(to("checkpoint.mirror"), "no copies elsewhere"),
    "trainer.max_actor_ckpt_to_keep": unless_null(
        to("checkpoint.keep"), "the newest ones are kept (checkpoint.keep)"
    ),
    "trainer.device": only(("cuda",), "GPUs", "CUDA GPUs or the CPU"),
    "trainer.val_only": only(
        (False,), "a run trains", "async-rl eval MODEL conf=FILE evaluates without training"
    ),
    "trainer.resume_mode": only(
        ("auto", "disable"),
        "async-rl resume RUN goes on with a run",
        "async-rl resume RUN goes on with a run",
    ),
    "trainer.*": same(TOOLS),
}

RULES: dict[str, Rule] = {
    **_DATA, **MODEL_RULES, **_REWARD, **_ALGORITHM, **_TRAINER,
    "global_profiler.*": same(TOOLS), "ray_kwargs.*": same(TOOLS), "ray_init.*": same(TOOLS),
}  # fmt: skip
