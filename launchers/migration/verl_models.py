"""Rules for verl's sections about models: actor, reference, rollout, critic, and their optimizers.

Used by migration_verl.py, which has the other sections.
"""

from __future__ import annotations

from typing import Any

import msgspec

from async_rl.launchers.migration.rules import (
    Fate,
    Rule,
    Source,
    choice,
    only,
    same,
    to,
    unless_null,
    when,
)

_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_ESTIMATOR = "algorithm.adv_estimator"
_BUDGET = (
    "a pass holds learner.budget_tokens tokens, whatever the number of sequences; gradients do not"
    " depend on it"
)
TOOLS = "has no counterpart and changes no result"
_REFERENCE = "the reference lies with the learner and is sharded as it is"
_BLOCKS = "the blocks that the model must not split are the shard units"
_NO_LORA = "all weights are trained"
KL = {
    "kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "full": "full",
}  # fmt: skip


_OVERRIDES = "actor_rollout_ref.model.override_config."


def _override(_: Any, source: Source) -> Fate:
    """Every field at once, since one setting of ours holds them all."""
    fields = {
        key.removeprefix(_OVERRIDES): value
        for key, value in source.items()
        if key.startswith(_OVERRIDES)
    }
    listed = [f"{name}={msgspec.json.encode(value).decode()}" for name, value in fields.items()]
    return Fate("translated", settings={"model.override_config": listed})


def _minibatches(value: Any, source: Source) -> Fate:
    batch = source.get("data.train_batch_size", 1024)
    if batch % value:
        return Fate(
            "refused",
            f"does not divide data.train_batch_size={batch}: minibatches of unlike size are not"
            " made",
        )
    return Fate("translated", f"{batch} / {value}", {"learner.minibatches": batch // value})


def _as_actor(key: str) -> Rule:
    def rule(value: Any, source: Source) -> Fate:
        if value == source.get(key, value):
            return Fate("defaulted", f"as {key}: actor and critic share it")
        return Fate("refused", f"differs from {key}; actor and critic share it here")

    return rule


def _warmup(path: str) -> Rule:
    def rule(value: Any, source: Source) -> Fate:
        if not value or value < 0:
            return Fate("translated", settings={path: 0})
        steps = source.get("trainer.total_training_steps")
        if not isinstance(steps, int) or steps <= 0:
            return Fate(
                "refused",
                f"a share of a number of steps that is not given; set {path}={value:g} x num_steps",
            )
        return Fate("translated", f"{value:g} x {steps}", {path: round(value * steps)})

    return rule


def _offload(value: Any, source: Source) -> Fate:
    prefix = f"{_A}.fsdp_config."
    if source.get(prefix + "param_offload") or source.get(prefix + "grad_offload"):
        return Fate(
            "translated",
            "parameters and gradients leave the GPU together",
            {"learner.offload": "parameters"},
        )
    return Fate(
        "translated",
        settings={
            "learner.offload": "optimizer" if source.get(prefix + "optimizer_offload") else "none"
        },
    )


def _kl_loss(value: Any, source: Source) -> Fate:
    in_reward = source.get("algorithm.use_kl_in_reward", True)
    if value and in_reward:
        return Fate(
            "refused", "a KL both in the reward and in the loss; the one in the reward is kept"
        )
    if value:
        coef, kind = (
            source.get(f"{_A}.kl_loss_coef", 0.001),
            KL.get(source.get(f"{_A}.kl_loss_type", "low_var_kl"), "k3"),
        )
        settings = {
            "algorithm.kl_placement": "loss",
            "algorithm.kl_coef": coef,
            "algorithm.kl_estimator": kind,
        }
        return Fate("translated", settings=settings)
    if not in_reward:
        return Fate("translated", "no KL anywhere", {"algorithm.kl_coef": 0.0})
    return Fate("defaulted", "the KL is in the reward")


def with_critic(rule: Rule) -> Rule:
    """The rule where there is a critic, which only gae asks for."""
    reason = "without effect: algorithm.adv_estimator needs no critic"
    return lambda value, source: (
        rule(value, source) if source.get(_ESTIMATOR, "gae") == "gae" else Fate("defaulted", reason)
    )


def metadata(_: Any, source: Source) -> Fate:
    """The rule of `_target_`."""
    return Fate("defaulted", "only names the class that reads the section")


def _optimizer(source: str, ours: str) -> dict[str, Rule]:
    return {
        f"{source}.lr": to(f"{ours}.lr"),
        f"{source}.lr_warmup_steps_ratio": _warmup(f"{ours}.warmup_steps"),
        f"{source}.lr_warmup_steps": lambda value, _: (
            Fate("defaulted", "lr_warmup_steps_ratio decides")
            if value is None or value < 0
            else Fate("translated", settings={f"{ours}.warmup_steps": value})
        ),
        f"{source}.warmup_style": choice(
            f"{ours}.schedule", {"constant": "constant", "cosine": "cosine"}, "constant or cosine"
        ),
        f"{source}.lr_scheduler_type": choice(
            f"{ours}.schedule", {"constant": "constant", "cosine": "cosine"}, "constant or cosine"
        ),
        f"{source}.min_lr_ratio": unless_null(
            to(f"{ours}.min_lr_ratio"), "only the cosine has a floor"
        ),
        f"{source}.weight_decay": to(f"{ours}.weight_decay"),
        f"{source}.betas": to(f"{ours}.betas"),
        f"{source}.total_training_steps": same("the total is num_steps"),
        f"{source}.num_cycles": only((0.5,), "the cosine falls once", "the cosine falls once"),
    }


_MODEL: dict[str, Rule] = {
    "actor_rollout_ref.hybrid_engine": only((False,), "generation and training do not share GPUs", "generation and training do not share "
                                            "GPUs here: each gets half of them"),
    "actor_rollout_ref.nccl_timeout": same("weights.deadline_s bounds a push, whatever it goes through"),
    "actor_rollout_ref.model.path": to("model.path"),
    "actor_rollout_ref.model.custom_chat_template": only((None,), "the tokenizer's own", "put the template into the model's tokenizer"),
    "actor_rollout_ref.model.external_lib": unless_null(to("model.external_lib"), "nothing is imported"),
    "actor_rollout_ref.model.override_config": only(({}, None), "nothing is overridden", "a mapping"),
    "actor_rollout_ref.model.override_config.*": _override,
    "actor_rollout_ref.model.enable_gradient_checkpointing": to("learner.gradient_checkpointing"),
    "actor_rollout_ref.model.enable_activation_offload": only((False,), "activations stay", "set learner.gradient_checkpointing=true"),
    "actor_rollout_ref.model.lora_rank": only((0,), _NO_LORA, _NO_LORA),
    "actor_rollout_ref.model.trust_remote_code": to("model.trust_remote_code"),
    "actor_rollout_ref.model.*": same(TOOLS),
}  # fmt: skip

_ACTOR: dict[str, Rule] = {
    f"{_A}._target_": metadata,
    f"{_A}.strategy": same("the learner is sharded by FSDP2, whatever the source used"),
    f"{_A}.ppo_mini_batch_size": _minibatches,
    f"{_A}.ppo_micro_batch_size": same(_BUDGET),
    f"{_A}.ppo_micro_batch_size_per_gpu": same(_BUDGET),
    f"{_A}.use_dynamic_bsz": same(_BUDGET),
    f"{_A}.ppo_max_token_len_per_gpu": to("learner.budget_tokens"),
    f"{_A}.grad_clip": to("learner.optimizer.grad_clip"),
    f"{_A}.clip_ratio": lambda value, source: Fate(
        "translated",
        settings={
            "algorithm.clip_low": source.get(f"{_A}.clip_ratio_low", value),
            "algorithm.clip_high": source.get(f"{_A}.clip_ratio_high", value),
        },
    ),
    f"{_A}.clip_ratio_low": to("algorithm.clip_low"),
    f"{_A}.clip_ratio_high": to("algorithm.clip_high"),
    f"{_A}.clip_ratio_c": to("algorithm.clip_dual"),
    f"{_A}.policy_loss.loss_mode": choice("algorithm.policy_loss", {"vanilla": "ppo", "gspo": "gspo"}, "see algorithm.policy_loss"),
    f"{_A}.policy_loss.*": same("belongs to a loss that is not chosen"),
    f"{_A}.loss_agg_mode": choice("algorithm.aggregation", {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"},
                                  "see algorithm.aggregation"),
    f"{_A}.entropy_coeff": to("algorithm.entropy_coef"),
    f"{_A}.use_kl_loss": _kl_loss,
    f"{_A}.kl_loss_coef": when(f"{_A}.use_kl_loss", True, same("taken with use_kl_loss"), "without effect: use_kl_loss=false"),
    f"{_A}.kl_loss_type": when(f"{_A}.use_kl_loss", True, same("taken with use_kl_loss"), "without effect: use_kl_loss=false"),
    f"{_A}.ppo_epochs": to("learner.epochs"),
    f"{_A}.shuffle": lambda value, source: (
        Fate("defaulted", "one minibatch holds everything, in whatever order")
        if source.get(f"{_A}.ppo_mini_batch_size") == source.get("data.train_batch_size", 1024)
        else Fate("translated", settings={"learner.shuffle": value})
    ),
    **_optimizer(f"{_A}.optim", "learner.optimizer"),
    f"{_A}.optim.*": same(TOOLS),
    f"{_A}.fsdp_config.param_offload": _offload,
    f"{_A}.fsdp_config.grad_offload": _offload,
    f"{_A}.fsdp_config.optimizer_offload": _offload,
    f"{_A}.fsdp_config.wrap_policy": only((None, {}), _BLOCKS, _BLOCKS),
    f"{_A}.fsdp_config.wrap_policy.min_num_params": to("learner.min_shard_params"),
    f"{_A}.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap": only(
        (None,), "the blocks that the model must not split", "the blocks that the model must not split are the shard units"
    ),
    f"{_A}.fsdp_config.fsdp_size": only((-1,), "over all ranks", "shards go over all ranks"),
    f"{_A}.fsdp_config.*": same(TOOLS),
    f"{_A}.ulysses_sequence_parallel_size": only((1,), "sequences are not split", "sequences are not split over ranks"),
    f"{_A}.checkpoint.*": same("a checkpoint holds everything that is needed to go on"),
    f"{_A}.*": same(TOOLS),
    "actor_rollout_ref.ref.fsdp_config.param_offload": only((False,), _REFERENCE, f"{_REFERENCE}; see learner.offload"),
    "actor_rollout_ref.ref.model": only((None,), "the start model is the reference", "the start model is the reference"),
    "actor_rollout_ref.ref.log_prob_micro_batch_size": same(_BUDGET),
    "actor_rollout_ref.ref.*": same(_REFERENCE),
}  # fmt: skip

_LOAD = {"dummy": "dummy", "dummy_dtensor": "dummy", "dummy_hf": "dummy", "dummy_megatron": "dummy", "auto": "auto", "hf": "auto",
         "dtensor": "auto", "megatron": "auto", "safetensors": "auto"}  # fmt: skip
_ROLLOUT: dict[str, Rule] = {
    f"{_R}.name": choice("generation.engine", {"vllm": "vllm", "hf": "hf"}, "vllm or hf"),
    f"{_R}.mode": same("rollouts are asynchronous"),
    f"{_R}.temperature": to("generation.temperature"),
    f"{_R}.top_k": only(
        (-1, 0),
        "the full support",
        "log-probs would be of another support than the learner's; set -1",
    ),
    f"{_R}.top_p": only(
        (1, 1.0),
        "the full support",
        "log-probs would be of another support than the learner's; set 1",
    ),
    f"{_R}.do_sample": only(
        (True,),
        "training samples",
        "training needs samples; evaluation.temperature=0 is greedy evaluation",
    ),
    f"{_R}.ignore_eos": to("generation.ignore_eos"),
    f"{_R}.n": to("generation.group_size"),
    f"{_R}.prompt_length": same("data.max_prompt_tokens"),
    f"{_R}.response_length": same("data.max_response_tokens"),
    f"{_R}.dtype": lambda value, _: (
        Fate(
            "translated",
            settings={
                "model.dtype": value,
                "weights.probe_tolerance": 0.3 if value == "bfloat16" else 1e-3,
            },
        )
        if value in ("bfloat16", "float32")
        else Fate("refused", "bfloat16 or float32")
    ),
    f"{_R}.gpu_memory_utilization": to("generation.vllm.gpu_memory_utilization"),
    f"{_R}.enforce_eager": to("generation.vllm.enforce_eager"),
    f"{_R}.free_cache_engine": same(
        "generators keep their GPUs, so the cache is never freed for the learner"
    ),
    f"{_R}.load_format": choice("generation.vllm.load_format", _LOAD, "auto or dummy"),
    f"{_R}.tensor_model_parallel_size": to("generation.vllm.tensor_parallel_size"),
    f"{_R}.max_num_batched_tokens": to("generation.vllm.max_num_batched_tokens"),
    f"{_R}.max_num_seqs": to("generation.vllm.max_num_seqs"),
    f"{_R}.max_model_len": same("the longest prompt and response"),
    f"{_R}.log_prob_micro_batch_size": same(_BUDGET),
    f"{_R}.val_kwargs.temperature": lambda value, source: (
        Fate("translated", settings={"evaluation.temperature": value})
        if source.get(f"{_R}.val_kwargs.do_sample")
        else Fate("defaulted", "do_sample=false is greedy")
    ),
    f"{_R}.val_kwargs.do_sample": lambda value, _: (
        Fate("defaulted", "evaluation.temperature decides")
        if value
        else Fate("translated", settings={"evaluation.temperature": 0.0})
    ),
    f"{_R}.val_kwargs.n": lambda value, source: (
        Fate("translated", settings={"evaluation.num_samples": value})
        if value == 1 or source.get(f"{_R}.val_kwargs.do_sample")
        else Fate("refused", "greedy samples of a prompt are all the same")
    ),
    f"{_R}.val_kwargs.top_k": only(
        (-1,), "the full support", "evaluation draws from the full support"
    ),
    f"{_R}.val_kwargs.top_p": only(
        (1, 1.0), "the full support", "evaluation draws from the full support"
    ),
    f"{_R}.multi_turn.enable": only((False,), "one turn", "rollouts have one turn"),
    f"{_R}.calculate_log_probs": same("behavior log-probs are always kept"),
    f"{_R}.*": same(TOOLS),
}

_CRITIC: dict[str, Rule] = {
    **_optimizer("critic.optim", "learner.critic.optimizer"),
    "critic.optim.*": same(TOOLS),
    "critic.enable": unless_null(to("learner.critic.enabled"), "where the advantage needs one"),
    "critic.model.path": _as_actor("actor_rollout_ref.model.path"),
    "critic.model.tokenizer_path": _as_actor("actor_rollout_ref.model.path"),
    "critic.model.enable_gradient_checkpointing": _as_actor(
        "actor_rollout_ref.model.enable_gradient_checkpointing"
    ),
    "critic.model.fsdp_config.param_offload": _as_actor(f"{_A}.fsdp_config.param_offload"),
    "critic.model.fsdp_config.optimizer_offload": _as_actor(f"{_A}.fsdp_config.optimizer_offload"),
    "critic.model.override_config": only(
        ({}, None), "nothing is overridden", "change config.json in model.path"
    ),
    "critic.model.lora_rank": only((0,), _NO_LORA, _NO_LORA),
    "critic.ppo_mini_batch_size": _as_actor(f"{_A}.ppo_mini_batch_size"),
    "critic.ppo_epochs": _as_actor(f"{_A}.ppo_epochs"),
    "critic.shuffle": _as_actor(f"{_A}.shuffle"),
    "critic.loss_agg_mode": _as_actor(f"{_A}.loss_agg_mode"),
    "critic.grad_clip": to("learner.critic.optimizer.grad_clip"),
    "critic.cliprange_value": with_critic(to("algorithm.value_clip")),
    "critic.*": same(f"as the actor's: one learner holds both; {_BUDGET}"),
}


MODEL_RULES: dict[str, Rule] = {**_MODEL, **_ACTOR, **_ROLLOUT, **_CRITIC}
