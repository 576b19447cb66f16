"""What becomes of the keys of an AReaL experiment configuration (`ppo-code`: four models, six
calls, `ppo.*`), and of its two variables.

Used by `async-rl migrate`.
"""

from __future__ import annotations

from typing import Any

from async_rl.launchers.migration.rules import (
    Fate,
    Rule,
    Source,
    choice,
    never,
    only,
    same,
    several_machines,
    to,
    to_wandb,
    unless_null,
    when,
)

_TOOLS = "has no counterpart and changes no result"
_CALLS = (
    "generators and learner have GPUs of their own: generators.*, learner.ranks,"
    " generation.vllm.tensor_parallel_size"
)
_BUDGET = (
    "a pass holds learner.budget_tokens tokens, whatever the number of sequences; gradients do not"
    " depend on it"
)
_SUPPORT = "log-probs would be of another support than the learner's"
_FULL_TOP_K = 1_000_000
IMPLIED = {
    "task": "code",
    "group_size": 1,
    "ppo.disable_value": False,
    "ppo.adv_norm": True,
    "ppo.value_norm": True,
}


def base(source: Source) -> str:
    """The configuration of ours to build on."""
    return "grpo_code" if source.get("ppo.disable_value") else "ppo_code"


def _advantages(value: Any, source: Source) -> Fate:
    if source.get("group_adv_norm"):
        return Fate(
            "translated", "over each prompt's group", {"algorithm.normalize_advantages": "group"}
        )
    return Fate(
        "translated", settings={"algorithm.normalize_advantages": "batch" if value else "none"}
    )


def _disable_value(value: Any, _: Source) -> Fate:
    if value:
        settings = {"algorithm.advantage": "reinforce_plus_plus", "learner.critic.enabled": False}
        return Fate("translated", "without values an advantage is what is still to come", settings)
    return Fate(
        "translated", settings={"algorithm.advantage": "gae", "learner.critic.enabled": True}
    )


def _with_critic(rule: Rule) -> Rule:
    reason = "without effect: ppo.disable_value=true"
    return lambda value, source: (
        Fate("defaulted", reason) if source.get("ppo.disable_value") else rule(value, source)
    )


def _value_norm(value: Any, source: Source) -> Fate:
    return Fate(
        "translated",
        settings={
            "algorithm.value_norm": source.get("ppo.value_norm_type", "exp") if value else "none"
        },
    )


def _dense(value: Any, source: Source) -> Fate:
    if not value:
        return Fate("translated", "one reward at the end", {"reward.placement": "end"})
    placement = "step_deltas" if source.get("reward_delta", True) else "steps"
    return Fate("translated", "a score per complete code block", {"reward.placement": placement})


def _filter(value: Any, source: Source) -> Fate:
    share = source.get("dataset_max_filter_percentage", 0)
    if not share or value >= source.get("ppo.max_reward_clip", 20.0):
        return Fate("translated", "no prompt leaves", {"data.filter.above": None})
    return Fate(
        "translated",
        settings={"data.filter.above": value, "data.filter.max_share": min(share, 0.99)},
    )


def _sequence(value: Any, source: Source) -> Fate:
    needed = source.get("dataset.max_prompt_len", 256) + source.get("ppo.gen.max_new_tokens", 256)
    if value < needed:
        return Fate(
            "refused",
            f"{value} is below prompt and response of {needed} tokens; the engine is given what"
            " they need",
        )
    return Fate("defaulted", f"the engine is given what prompt and response need: {needed} tokens")


def _warmup(path: str) -> Rule:
    return lambda value, _: (
        Fate(
            "refused",
            f"a share of a number of steps that is not given; set {path}={value:g} x num_steps",
        )
        if value
        else Fate("translated", settings={path: 0})
    )


def _beta(path: str, place: int) -> Rule:
    def rule(value: Any, source: Source) -> Fate:
        prefix = "actor" if path == "learner.optimizer" else "critic"
        betas = [
            source.get(f"{prefix}.optimizer.beta1", 0.9),
            source.get(f"{prefix}.optimizer.beta2", 0.95),
        ]
        betas[place] = value
        return Fate("translated", settings={f"{path}.betas": betas})

    return rule


def _optimizer(role: str, path: str) -> dict[str, Rule]:
    prefix = f"{role}.optimizer"
    schedules = {"constant": "constant", "cosine": "cosine"}
    return {
        f"{prefix}.type": only(("adam", "adamw"), "AdamW", "AdamW is the optimizer"),
        f"{prefix}.lr": to(f"{path}.lr"),
        f"{prefix}.weight_decay": to(f"{path}.weight_decay"),
        f"{prefix}.beta1": _beta(path, 0),
        f"{prefix}.beta2": _beta(path, 1),
        f"{prefix}.eps": to(f"{path}.eps"),
        f"{prefix}.min_lr_ratio": to(f"{path}.min_lr_ratio"),
        f"{prefix}.lr_scheduler_type": choice(f"{path}.schedule", schedules, "constant or cosine"),
        f"{prefix}.warmup_steps_proportion": _warmup(f"{path}.warmup_steps"),
        f"{prefix}.gradient_clipping": to(f"{path}.grad_clip"),
        f"{prefix}.offload": only(
            (False,), "moments stay with the learner", "set learner.offload=optimizer"
        ),
        f"{prefix}.*": same(_TOOLS),
    }


_MODELS: dict[str, Rule] = {
    "actor.path": to("model.path"),
    "actor.gradient_checkpointing": to("learner.gradient_checkpointing"),
    "actor.bf16": lambda value, _: Fate(
        "translated",
        settings={
            "model.dtype": "bfloat16" if value else "float32",
            "weights.probe_tolerance": 0.3 if value else 1e-3,
        },
    ),
    "actor.backend": same("the learner is sharded by FSDP2, whatever the source used"),
    "actor.init_from_scratch": only(
        (False,), "weights are loaded", "weights are loaded from model.path"
    ),
    "actor.vllm.max_seq_len_to_capture": _sequence,
    "actor.vllm.max_num_seqs": to("generation.vllm.max_num_seqs"),
    "actor.vllm.max_num_batched_tokens": unless_null(
        to("generation.vllm.max_num_batched_tokens"), "as in conf/"
    ),
    "actor.vllm.gpu_memory_utilization": to("generation.vllm.gpu_memory_utilization"),
    "actor.vllm.enforce_eager": to("generation.vllm.enforce_eager"),
    "actor.vllm.load_format": choice(
        "generation.vllm.load_format", {"auto": "auto", "dummy": "dummy"}, "auto or dummy"
    ),
    **_optimizer("actor", "learner.optimizer"),
    "actor.*": same(_TOOLS),
    **{
        key: _with_critic(rule)
        for key, rule in _optimizer("critic", "learner.critic.optimizer").items()
    },
    "critic.path": lambda value, source: (
        Fate("defaulted", "the critic starts from the policy's backbone")
        if value in (None, "", source.get("actor.path"))
        else Fate(
            "refused", "the critic starts from the policy's backbone, not from a model of its own"
        )
    ),
    "critic.init_critic_from_actor": only(
        (True,), "a fresh head on the policy's backbone", "the critic starts from the policy"
    ),
    "critic.*": same("as the actor's: one learner holds both"),
    "ref.path": lambda value, source: (
        Fate("defaulted", "the start model is the reference")
        if value in (None, "", source.get("actor.path"))
        else Fate("refused", "the start model is the reference, not another one")
    ),
    "ref.*": same("the reference lies with the learner and is sharded as it is"),
    "rew.*": same("programs are scored by their tests, the source's model only lent its tokenizer"),
    "actor_train.mb_spec.max_tokens_per_mb": lambda value, _: (
        Fate("translated", settings={"learner.budget_tokens": value})
        if value < 1e9
        else Fate("defaulted", _BUDGET)
    ),
    **{
        f"{call}.mb_spec.*": same(_BUDGET)
        for call in ("actor_gen", "actor_train", "critic_train", "critic_inf", "ref_inf", "rew_inf")
    },
    **{
        f"{call}.*": same(_CALLS)
        for call in ("actor_gen", "actor_train", "critic_train", "critic_inf", "ref_inf", "rew_inf")
    },
}

_PPO: dict[str, Rule] = {
    "ppo.gen.n": only(
        (1,), "group_size decides", "group_size decides how many samples a prompt gets"
    ),
    "ppo.gen.max_new_tokens": to("data.max_response_tokens"),
    "ppo.gen.min_new_tokens": only((0,), "a response may end at once", f"{_SUPPORT}; set it to 0"),
    "ppo.gen.greedy": only(
        (False,),
        "training samples",
        "training needs samples; evaluation.temperature=0 is greedy evaluation",
    ),
    "ppo.gen.top_p": only((1, 1.0), "the full support", f"{_SUPPORT}; set 1"),
    "ppo.gen.top_k": lambda value, _: (
        Fate("defaulted", "the full support")
        if value < 0 or value >= _FULL_TOP_K
        else Fate("refused", f"{_SUPPORT}; set -1")
    ),
    "ppo.gen.temperature": to("generation.temperature"),
    "ppo.gen.*": same(_TOOLS),
    "ppo.ppo_n_minibatches": to("learner.minibatches"),
    "ppo.kl_ctl": lambda value, _: Fate(
        "translated",
        settings={
            "algorithm.kl_coef": value,
            "algorithm.kl_placement": "reward",
            "algorithm.kl_estimator": "k1",
        },
    ),
    "ppo.discount": _with_critic(to("algorithm.gamma")),
    "ppo.gae_lambda": _with_critic(to("algorithm.gae_lambda")),
    "ppo.eps_clip": to("algorithm.clip_low", "algorithm.clip_high"),
    "ppo.value_eps_clip": _with_critic(to("algorithm.value_clip")),
    "ppo.disable_value": _disable_value,
    "ppo.max_reward_clip": to("reward.clip"),
    "ppo.reward_output_scaling": to("reward.scale"),
    "ppo.reward_output_bias": to("reward.bias"),
    "ppo.early_stop_imp_ratio": to("algorithm.max_mean_ratio"),
    "ppo.use_adaptive_kl_ctl": to(
        "algorithm.kl_controller", by=lambda value: "adaptive" if value else "fixed"
    ),
    "ppo.adv_norm": _advantages,
    "ppo.value_norm": _with_critic(_value_norm),
    "ppo.value_norm_type": _with_critic(
        when(
            "ppo.value_norm",
            False,
            same("without effect: ppo.value_norm=false"),
            "with ppo.value_norm",
        )
    ),
    "ppo.value_norm_beta": _with_critic(to("algorithm.value_norm_beta")),
    "ppo.value_norm_eps": _with_critic(to("algorithm.value_norm_eps")),
}

_TASK: dict[str, Rule] = {
    "dataset.path": lambda value, _: Fate(
        "translated",
        "no held-out files are named, so nothing is evaluated",
        {"data.train_files": [value], "evaluation.every_steps": 0},
    ),
    "dataset.max_prompt_len": to("data.max_prompt_tokens"),
    "dataset.train_bs_n_seqs": to("buffer.groups_per_step"),
    "dataset.fill_to_max_length": to("data.fill_to_max_tokens"),
    "REAL_CODE_METADATA_PATH": to("data.metadata_file"),
    "FUNCTIONCALL_SERVICE_DOMAIN": same(
        "our own verifiers run the programs; async-rl verifier serves the same protocol"
    ),
    "group_size": to("generation.group_size"),
    "generation_size": to("generation.generation_size"),
    "mask_no_eos_with_zero": to("algorithm.zero_truncated_reward"),
    "mask_too_long": to("algorithm.mask_truncated"),
    "rm_output_scaling": unless_null(to("reward.model.scale"), "1"),
    "ref_ema_eta": to("algorithm.ref_ema_eta", by=lambda value: value or 0.0),
    "group_adv_norm": same("taken with ppo.adv_norm"),
    "rw_type": only(("sparse", "dense", None), "use_dense_reward decides", "sparse or dense"),
    "task": lambda value, _: (
        Fate(
            "translated",
            "a pass is +1, a fail -1",
            {"reward.pass_reward": 1.0, "reward.fail_reward": -1.0},
        )
        if value in ("code", "math")
        else Fate("refused", "code or math")
    ),
    "check_xml_format": lambda value, _: (
        Fate("translated", settings={"reward.format_reward": -0.8})
        if value
        else Fate("defaulted", "the form of the answer is not scored")
    ),
    "use_dense_reward": _dense,
    "reward_delta": same("taken with use_dense_reward"),
    "check_verifier_status": to("reward.stop_if_all_fail"),
    "dataset_filter_threshold": _filter,
    "dataset_max_filter_percentage": same("taken with dataset_filter_threshold"),
}

_RUN: dict[str, Rule] = {
    "experiment_name": to("run_name"),
    "seed": to("seed"),
    "n_nodes": several_machines("n_gpus_per_node"),
    "n_gpus_per_node": same(_CALLS),
    "allocation_mode": same(_CALLS),
    "exp_ctrl.total_train_epochs": lambda value, source: (
        Fate("defaulted", "exp_ctrl.benchmark_steps is given")
        if isinstance(source.get("exp_ctrl.benchmark_steps"), int)
        else Fate("translated", settings={"num_steps": None, "data.epochs": value})
    ),
    "exp_ctrl.benchmark_steps": unless_null(to("num_steps"), "total_train_epochs decides"),
    "exp_ctrl.save_freq_steps": unless_null(to("checkpoint.every_steps"), "not by steps"),
    "exp_ctrl.ckpt_freq_steps": unless_null(to("checkpoint.every_steps"), "not by steps"),
    "exp_ctrl.save_freq_secs": unless_null(to("checkpoint.every_minutes", by=lambda value: value / 60), "not by time"),
    "exp_ctrl.ckpt_freq_secs": unless_null(to("checkpoint.every_minutes", by=lambda value: value / 60), "not by time"),
    "exp_ctrl.eval_freq_steps": unless_null(never("no held-out files are named; set data.val_files and evaluation.every_steps"), "off"),
    "exp_ctrl.*": unless_null(never("told in learner steps here: checkpoint.every_steps, evaluation.every_steps"), "off"),
    "recover_mode": same("a run is resumed by async-rl resume RUN"),
    "wandb.mode": lambda value, source: (
        to_wandb(source.get("wandb.project") or source.get("experiment_name", "areal"))
        if value == "online"
        else Fate("defaulted", "metrics go to the terminal, a file and TensorBoard")
    ),
    **{f"{name}.*": same(_TOOLS) for name in ("wandb", "swanlab", "tensorboard", "auto_eval_config")},
    **{
        name: same(_TOOLS)
        for name in ("trial_name", "mode", "debug", "partition", "image_name", "nodelist", "recover_retries", "recover_after",
                     "schedule_strategy", "ignore_worker_error", "cache_clear_freq", "torch_cache_mysophobia", "auto_eval")
    },
}  # fmt: skip

RULES: dict[str, Rule] = {**_MODELS, **_PPO, **_TASK, **_RUN}
