"""Every setting of the objective and the learner, and every knob of the two source systems about
them, names the test that proves it.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from async_rl.launchers.configuration.schema import settings

TESTS = Path(__file__).resolve().parents[1]

_ADVANTAGES, _LOSSES, _POLICY = (
    "algorithms/test_advantages.py::",
    "algorithms/test_losses.py::",
    "learner/test_policy_losses.py::",
)
_OBJECTIVE, _TRAINING, _TRAINER = (
    "learner/test_objective.py::",
    "learner/test_objective_in_training.py::",
    "learner/test_trainer.py::",
)
_GRADIENTS, _OPTIMIZER, _CRITIC = (
    "learner/test_gradients.py::",
    "learner/test_optimizer.py::",
    "learner/test_critic.py::",
)
_UNITS, _CONFIG = "algorithms/test_value_norm.py::", "config/test_config_check.py::"
_EVERY_OPTIMIZER = (
    f"{_OPTIMIZER}test_every_setting_of_the_optimizer_changes_what_is_trained_as_the_formula_says"
)

SETTINGS = {
    "algorithm.advantage": f"{_ADVANTAGES}test_group_advantages_equal_the_loop",
    "algorithm.gamma": f"{_OBJECTIVE}test_gamma_discounts_the_reward_of_later_tokens",
    "algorithm.gae_lambda": f"{_ADVANTAGES}test_gae_equals_its_definition",
    "algorithm.vtrace_rho_max": (
        f"{_OBJECTIVE}test_vtrace_weighs_differences_by_the_proximal_policy_over_the_behavior_policy"
    ),
    "algorithm.vtrace_c_max": (
        f"{_OBJECTIVE}test_vtrace_weighs_differences_by_the_proximal_policy_over_the_behavior_policy"
    ),
    "algorithm.normalize_advantages": (
        f"{_OBJECTIVE}test_advantages_are_normalized_over_the_batch_or_over_each_group"
    ),
    "algorithm.policy_loss": f"{_POLICY}test_the_second_update_of_a_batch_equals_the_formula",
    "algorithm.clip_low": f"{_LOSSES}test_clipped_loss_equals_the_formula_token_by_token",
    "algorithm.clip_high": f"{_LOSSES}test_clipped_loss_equals_the_formula_token_by_token",
    "algorithm.clip_dual": f"{_TRAINING}test_a_dual_clip_bounds_what_unwanted_tokens_cost",
    "algorithm.max_mean_ratio": (
        f"{_POLICY}test_sequences_whose_mean_ratio_is_too_high_are_left_out_and_counted"
    ),
    "algorithm.behavior_correction": (
        f"{_POLICY}test_on_the_first_update_every_loss_is_the_weighted_policy_gradient"
    ),
    "algorithm.behavior_weight_max": (
        "algorithms/test_corrections.py::test_weights_equal_the_definition"
    ),
    "algorithm.behavior_weight_min": (
        "algorithms/test_corrections.py::test_weights_equal_the_definition"
    ),
    "algorithm.geometric_max": f"{_POLICY}test_the_geometric_mask_takes_whole_sequences_out",
    "algorithm.geometric_min": (
        "algorithms/test_corrections.py::test_the_geometric_mask_looks_at_the_mean_and_not_at_the_length"
    ),
    "algorithm.entropy_coef": f"{_GRADIENTS}test_grpo_gradient_equals_the_oracle",
    "algorithm.kl_coef": f"{_GRADIENTS}test_grpo_gradient_equals_the_oracle",
    "algorithm.kl_placement": (
        f"{_OBJECTIVE}test_kl_in_the_reward_lowers_the_advantage_of_tokens_that_left_the_reference"
    ),
    "algorithm.kl_estimator": f"{_POLICY}test_the_kl_in_the_loss_pulls_back_to_the_reference",
    "algorithm.kl_controller": (
        f"{_OBJECTIVE}test_the_adaptive_coefficient_follows_the_kl_of_a_sequence"
    ),
    "algorithm.kl_target": (
        "algorithms/test_kl.py::test_the_adaptive_coefficient_grows_above_its_target_and_falls_below"
    ),
    "algorithm.kl_horizon": (
        "algorithms/test_kl.py::test_the_adaptive_coefficient_grows_above_its_target_and_falls_below"
    ),
    "algorithm.ref_ema_eta": (
        f"{_TRAINER}test_a_moving_reference_takes_on_a_share_of_the_policy_after_each_step_and_is_restored"
    ),
    "algorithm.aggregation": f"{_POLICY}test_aggregations_weigh_tokens_as_their_formulas_say",
    "algorithm.aggregation_tokens": (
        f"{_LOSSES}test_sequence_sum_divides_by_its_constant_whatever_the_length"
    ),
    "algorithm.mask_truncated": (
        f"{_OBJECTIVE}test_truncated_samples_are_left_out_of_loss_and_statistics_when_masked"
    ),
    "algorithm.zero_truncated_reward": (
        f"{_OBJECTIVE}test_the_reward_of_a_truncated_sample_is_0_after_scaling_and_its_kl_stays"
    ),
    "algorithm.value_clip": (
        f"{_TRAINING}test_a_clipped_value_update_costs_what_lies_beyond_the_clip"
    ),
    "algorithm.value_coef": (
        f"{_TRAINING}test_the_weight_of_the_value_loss_scales_the_critics_gradient"
    ),
    "algorithm.value_norm": f"{_TRAINING}test_the_critic_learns_faster_in_units_of_large_returns",
    "algorithm.value_norm_beta": (
        f"{_UNITS}test_exp_is_the_weighted_mean_of_the_batches_without_the_bias_of_its_start"
    ),
    "algorithm.value_norm_eps": f"{_UNITS}test_a_weight_below_eps_counts_as_eps",
    "learner.ranks": "learner/test_two_ranks.py::test_two_ranks_reach_the_weights_of_one",
    "learner.cores": f"{_CONFIG}test_what_the_machine_lacks_is_refused",
    "learner.gpus_each": f"{_CONFIG}test_what_the_machine_lacks_is_refused",
    "learner.minibatches": "learner/test_batching.py::test_minibatches_share_out_all_sequences",
    "learner.epochs": f"{_POLICY}test_the_second_update_of_a_batch_equals_the_formula",
    "learner.shuffle": (
        "learner/test_batching.py::test_without_shuffling_groups_are_dealt_out_in_their_order"
    ),
    "learner.budget_tokens": f"{_GRADIENTS}test_memory_knobs_do_not_change_gradients",
    "learner.logits_chunk_mb": (
        "algorithms/test_logprobs.py::test_only_one_chunk_of_logits_exists_at_a_time"
    ),
    "learner.gradient_checkpointing": f"{_GRADIENTS}test_memory_knobs_do_not_change_gradients",
    "learner.min_shard_params": (
        "learner/test_sharding.py::test_modules_of_the_wanted_size_are_the_units"
    ),
    "learner.offload": (
        "learner/test_sharding.py::test_neither_offloading_nor_the_shard_units_change_what_is_trained"
    ),
    "learner.optimizer.lr": _EVERY_OPTIMIZER,
    "learner.optimizer.weight_decay": _EVERY_OPTIMIZER,
    "learner.optimizer.betas": _EVERY_OPTIMIZER,
    "learner.optimizer.eps": _EVERY_OPTIMIZER,
    "learner.optimizer.warmup_steps": _EVERY_OPTIMIZER,
    "learner.optimizer.schedule": _EVERY_OPTIMIZER,
    "learner.optimizer.min_lr_ratio": f"{_OPTIMIZER}test_the_floor_of_the_cosine_is_a_share_of_lr",
    "learner.optimizer.grad_clip": _EVERY_OPTIMIZER,
    "learner.critic.enabled": (
        f"{_CONFIG}test_a_combination_that_cannot_work_is_refused_with_its_remedy"
    ),
    "learner.critic.backbone": (
        f"{_CRITIC}test_a_shared_backbone_gets_the_gradient_of_the_values_too"
    ),
    "learner.critic.warmup_steps": (
        f"{_CRITIC}test_during_the_warm_up_only_the_head_on_a_shared_backbone_learns"
    ),
    "learner.take_timeout_s": (
        "rollouts/test_taking.py::"
        "test_a_batch_later_than_the_timeout_ends_the_run_with_what_the_buffer_waits_for"
    ),
}
"""Setting -> test. Those of the critic's optimizer are those of the policy's: one class."""

SOURCE_KNOBS = {
    "log_prob_micro_batch_size": SETTINGS["learner.budget_tokens"],
    "temperature": f"{_TRAINER}test_temperature_divides_the_learners_logits",
    "gamma, lam": SETTINGS["algorithm.gae_lambda"],
    "values of truncated responses": (
        f"{_ADVANTAGES}test_truncation_bootstraps_from_the_value_after_the_last_token"
    ),
    "masks inside a response": (
        f"{_ADVANTAGES}test_gae_by_hand_skips_the_tool_output_between_two_tokens"
    ),
    "adv_estimator": SETTINGS["algorithm.advantage"],
    "adv_norm, group_adv_norm": SETTINGS["algorithm.normalize_advantages"],
    "clip_ratio, eps_clip": f"{_LOSSES}test_clipped_loss_and_its_gradient_by_hand",
    "decoupled objective": SETTINGS["algorithm.policy_loss"],
    "entropy_coeff": SETTINGS["algorithm.entropy_coef"],
    "kl_penalty": "algorithms/test_kl.py::test_kl_estimators_by_hand",
    "kl_penalty full": (
        "algorithms/test_kl.py::test_the_exact_kl_and_its_gradient_equal_plain_autograd"
    ),
    "kl_coef in the reward": SETTINGS["algorithm.kl_placement"],
    "use_adaptive_kl_ctl": SETTINGS["algorithm.kl_controller"],
    "cliprange_value": f"{_LOSSES}test_value_loss_by_hand",
    "value_norm_type": f"{_UNITS}test_ma_is_the_mean_and_spread_of_all_tokens_so_far",
    "value_norm in the checkpoint": f"{_OBJECTIVE}test_what_the_objective_remembers_comes_back",
    "disable_value": f"{_CONFIG}test_a_combination_that_cannot_work_is_refused_with_its_remedy",
    "early_stop_imp_ratio": SETTINGS["algorithm.max_mean_ratio"],
    "ppo_micro_batch_size": SETTINGS["learner.budget_tokens"],
    "ppo_n_minibatches": SETTINGS["learner.minibatches"],
    "ppo_epochs": SETTINGS["learner.epochs"],
    "ref_ema_eta off": f"{_TRAINER}test_a_reference_without_a_share_stays_where_it_was",
    "critic_warmup": f"{_TRAINER}test_the_critic_learns_the_returns",
    "mask_too_long": SETTINGS["algorithm.mask_truncated"],
    "mask_no_eos_with_zero": SETTINGS["algorithm.zero_truncated_reward"],
    "generation_size": (
        "algorithms/test_selection.py::test_the_best_are_kept_and_of_equals_the_longer"
    ),
    "use_dense_reward, reward_delta": f"{_OBJECTIVE}test_rewards_of_steps_land_where_the_steps_end",
    "dataset_filter_threshold": (
        "data/test_score_filter.py::test_prompts_above_the_bound_leave_highest_first"
    ),
    "dataset_max_filter_percentage": (
        "data/test_score_filter.py::test_no_more_leave_than_the_share_rounded_down"
    ),
    "dataset filter after a resume": (
        "buffer/test_data_filter.py::test_a_buffer_that_starts_again_goes_on_with_the_same_prompts"
    ),
    "dtype": f"{_TRAINER}test_bfloat16_compute_keeps_float32_masters_and_follows_float32",
    "wrap_policy, min_num_params": SETTINGS["learner.min_shard_params"],
    "param_offload, optimizer_offload": SETTINGS["learner.offload"],
    "enable_gradient_checkpointing": SETTINGS["learner.gradient_checkpointing"],
    "lr_warmup_steps_ratio": (
        "algorithms/test_schedule_and_diagnostics.py::test_warm_up_never_has_a_rate_of_zero_and_ends_at_lr"
    ),
    "warmup_style, min_lr_ratio": (
        "algorithms/test_schedule_and_diagnostics.py::test_cosine_falls_to_its_floor_and_stays"
    ),
    "grad_clip": _EVERY_OPTIMIZER,
}
"""What the source systems called it -> test of what is right."""


@functools.cache
def functions(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_setting_of_the_objective_and_the_learner_names_its_test() -> None:
    named = {path for path in settings() if path.startswith(("algorithm.", "learner."))}
    assert {
        path.replace("learner.critic.optimizer.", "learner.optimizer.") for path in named
    } == set(SETTINGS)


@pytest.mark.parametrize("knob", [*SETTINGS, *SOURCE_KNOBS])
def test_the_named_test_exists(knob: str) -> None:
    file, _, function = (SETTINGS | SOURCE_KNOBS)[knob].partition("::")
    assert function in functions(file), f"{knob}: {file} has no test {function}"
