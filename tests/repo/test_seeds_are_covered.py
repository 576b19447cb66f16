"""Each knob of the two source systems about data, sampling, reward and the run has tests in which
its settings differ, and they exist.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

COVERED = {
    # data
    "train_files, val_files: jsonl and parquet": (
        "data/test_prompts.py::test_parquet_rows_give_the_same_prompts_as_jsonl"
    ),
    "train_files, val_files: one or several": (
        "data/test_sources.py::test_a_pattern_names_its_files_in_order_and_none_twice"
    ),
    "train_files, val_files: URLs in a cache": (
        "data/test_sources.py::test_a_remote_file_is_copied_once_and_again_only_when_it_changed"
    ),
    "train_files, val_files: the cache's lock": (
        "data/test_streamed.py::test_processes_that_want_the_same_remote_file_copy_it_once"
    ),
    "train_files: never whole in memory": (
        "data/test_streamed.py::test_a_large_file_is_never_in_memory"
    ),
    "prompt_key": "data/test_prompts.py::test_prompt_key_chooses_the_column",
    "prompt_key: chats and strings": (
        "data/test_prompts.py::test_the_chat_template_wraps_strings_and_chats_and_opens_the_answer"
    ),
    "verl's schema, data_source": (
        "data/test_sources.py::test_math_rows_want_their_expression_and_an_unknown_source_is_refused"
    ),
    "max_prompt_length, truncation": (
        "data/test_sources.py::test_each_truncation_keeps_its_own_tokens"
    ),
    "truncation: error and drop": (
        "data/test_prompts.py::test_over_long_prompts_are_an_error_or_dropped_and_counted"
    ),
    "max_response_length": (
        "generation/test_engines.py::test_samples_end_with_an_end_token_or_are_truncated"
    ),
    "train_batch_size": (
        "config/test_compose.py::test_the_number_of_steps_follows_from_the_epochs_and_the_rows_of_all_files"
    ),
    "val_batch_size: every row": (
        "buffer/test_evaluation.py::"
        "test_every_held_out_row_of_files_is_evaluated_and_of_the_embedded_task_the_first_256"
    ),
    "prompt_id_key, max_prompt_id_length": (
        "data/test_sources.py::test_the_id_column_can_be_chosen_and_over_long_ids_are_refused"
    ),
    "tokenizer": "data/test_tokenizer.py::test_another_tokenizer_can_be_named",
    "AReaL's code data, REAL_CODE_METADATA_PATH": (
        "data/test_sources.py::test_areal_rows_find_their_tests_in_the_metadata_file"
    ),
    "input_output without fn_name": (
        "data/test_prompts.py::test_input_output_without_a_function_is_standard_input"
    ),
    "input_output with fn_name": (
        "data/test_prompts.py::test_input_output_with_a_function_has_one_json_argument_per_line"
    ),
    "fill_to_max_length": (
        "data/test_sources.py::test_filled_prompts_all_have_the_longest_length_and_end_as_they_did"
    ),
    "dataset_filter_threshold": (
        "data/test_score_filter.py::test_prompts_above_the_bound_leave_highest_first"
    ),
    "dataset_filter_threshold off": "data/test_score_filter.py::test_without_a_bound_nobody_leaves",
    "dataset_max_filter_percentage": (
        "data/test_score_filter.py::test_no_more_leave_than_the_share_rounded_down"
    ),
    "the active set survives a resume": (
        "data/test_score_filter.py::"
        "test_every_epoch_holds_what_is_left_once_and_another_process_finds_the_same"
    ),
    "bad rows": (
        "data/test_sources.py::test_bad_rows_are_refused_with_their_number_or_left_out_and_counted"
    ),
    "return_raw_input_ids, return_raw_chat": (
        "rewards/test_reward_model_and_remote.py::"
        "test_the_reward_model_reads_prompt_and_response_in_its_own_template"
    ),
    # rollout: engine, best of n, sampling
    "rollout.name": (
        "generation/test_engines.py::test_logprobs_are_those_of_the_tempered_distribution"
    ),
    "ignore_eos": (
        "generation/test_ignore_eos.py::test_an_end_token_ends_a_sample_unless_it_is_ignored"
    ),
    "do_sample": "cli/test_migrate.py::test_another_value_of_a_key_has_its_own_fate",
    "free_cache_engine": "cli/test_migrate.py::test_another_value_of_a_key_has_its_own_fate",
    "hybrid_engine": "cli/test_migrate.py::test_another_value_of_a_key_has_its_own_fate",
    "load_format and the other engine settings": (
        "generation/test_engine_settings.py::test_a_setting_reaches_vllm"
    ),
    "max_seq_len_to_capture": (
        "planning/test_estimate.py::test_what_cannot_fit_is_refused_with_both_numbers"
    ),
    "external_lib": (
        "learner/test_own_architectures.py::test_the_named_module_is_imported_before_a_model_is_made"
    ),
    "override_config": (
        "data/test_prepare.py::test_fields_of_the_models_configuration_are_overridden_in_a_directory_of_its_own"
    ),
    "group_size, generation_size": (
        "rollouts/test_generator_groups.py::test_of_more_samples_the_best_are_kept_and_of_equals_the_longer"
    ),
    "temperature of generator and learner": (
        "learner/test_trainer.py::test_temperature_divides_the_learners_logits"
    ),
    "temperature 0, greedy": (
        "generation/test_engines.py::test_temperature_0_takes_the_likeliest_token"
    ),
    "greedy and sampled evaluation": (
        "rollouts/test_generator_groups.py::"
        "test_an_evaluation_adds_one_greedy_answer_to_its_samples_where_that_is_asked_for"
    ),
    "top_p, top_k, min_new_tokens": (
        "config/test_config_check.py::test_a_combination_that_cannot_work_is_refused_with_its_remedy"
    ),
    "log_prob_micro_batch_size": (
        "learner/test_gradients.py::test_memory_knobs_do_not_change_gradients"
    ),
    # reward
    "rule by data_source: GSM8K": (
        "rewards/test_answers.py::test_gsm8k_compares_the_number_after_the_mark_or_the_last_one"
    ),
    "rule by data_source: MATH": (
        "rewards/test_answers.py::test_math_compares_the_last_boxed_expression_as_mathematics"
    ),
    "rule by data_source: module:function": (
        "rewards/test_reward_terms.py::test_a_data_source_may_have_a_function_of_its_own"
    ),
    "rw_type, use_dense_reward": (
        "learner/test_objective.py::test_rewards_of_steps_land_where_the_steps_end"
    ),
    "reward_delta": (
        "learner/test_objective.py::test_the_sum_of_step_deltas_is_the_final_score_above_a_fail_for_group_estimators_too"
    ),
    "dense: a score per block": (
        "rewards/test_step_scores.py::test_each_complete_block_is_a_step_scored_by_the_tests_that_it_passes"
    ),
    "code extraction": (
        "rewards/test_comparison_and_extraction.py::test_last_fenced_block_that_parses_is_taken"
    ),
    "check_xml_format": (
        "rewards/test_reward_terms.py::test_the_form_changes_the_reward_of_wrong_answers_only"
    ),
    "score mapping": "rewards/test_server_and_client.py::test_scorer_gives_rewards_by_mode",
    "reward_output_scaling, bias, max_reward_clip": (
        "data/test_score_filter.py::test_the_reward_is_scaled_as_for_training_before_the_mean"
    ),
    "check_verifier_status": (
        "learner/test_trainer.py::test_a_step_of_which_no_sample_is_rewarded_stops_the_run_where_that_is_asked_for"
    ),
    "check_verifier_status as an alarm": (
        "monitoring/test_alarm.py::"
        "test_the_first_step_without_a_reward_raises_it_and_again_only_after_one_with"
    ),
    "mask_no_eos_with_zero": (
        "learner/test_objective.py::test_the_reward_of_a_truncated_sample_is_0_after_scaling_and_its_kl_stays"
    ),
    "mask_too_long": (
        "learner/test_objective.py::test_truncated_samples_are_left_out_of_loss_and_statistics_when_masked"
    ),
    "rule and model scores with weights": (
        "rewards/test_reward_terms.py::test_the_reward_is_the_weighted_sum_and_every_part_has_its_name"
    ),
    "FUNCTIONCALL_SERVICE_DOMAIN: served": (
        "rewards/test_wire_forms.py::test_areal_function_client_gets_right_verdicts"
    ),
    "infrastructure failures": (
        "rewards/test_wire_forms.py::test_infrastructure_failure_is_retried_by_every_client_and_never_an_answer"
    ),
    # run
    "total_epochs": (
        "config/test_compose.py::test_the_number_of_steps_follows_from_the_epochs_and_the_rows_of_all_files"
    ),
    "project_name, logger: wandb": (
        "cli/test_migrate.py::test_numbers_go_to_wandb_where_it_is_installed"
    ),
    "logger: tensorboard": (
        "monitoring/test_tensorboard_process.py::test_tensorboard_serves_the_run_on_loopback_and_leaves_nothing_behind"
    ),
    "default_local_dir": "cli/test_migrate.py::test_another_value_of_a_key_has_its_own_fate",
    "test_freq": (
        "monitoring/test_recorder.py::test_evaluations_are_due_at_zero_at_every_nth_and_at_the_last_step"
    ),
    "experiment_name": "cli/test_runs.py::test_a_run_is_found_by_name_and_by_directory",
    "nnodes, n_gpus_per_node": (
        "planning/test_topology.py::test_gpus_are_dealt_out_whole_or_in_shares_and_hidden_from_the_others"
    ),
    "save_freq": (
        "training/test_checkpoints.py::test_the_newest_and_the_best_of_the_older_ones_are_kept"
    ),
    "default_hdfs_dir": (
        "training/test_mirror.py::test_copies_follow_the_run_and_bring_the_newest_of_it_back"
    ),
    "checkpoints hold everything": (
        "learner/test_trainer.py::test_a_restored_run_goes_on_bit_for_bit"
    ),
    # every key, through the translation
    "keys of both systems": (
        "cli/test_migrate.py::test_every_key_is_mentioned_once_and_the_result_is_accepted"
    ),
}


@functools.cache
def functions(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text())
    return frozenset(
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


@pytest.mark.parametrize("knob", COVERED)
def test_the_test_of_a_knob_exists(knob: str) -> None:
    file, _, name = COVERED[knob].partition("::")
    assert name in functions(file)
