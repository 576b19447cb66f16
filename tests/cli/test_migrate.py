"""Facts about `async-rl migrate`: no key goes unmentioned, and each setting of a key has its own
fate.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from empty_model import write_model
from migration_sources import AREAL, VERL_FIRST, VERL_TODAY
from typer.testing import CliRunner

from async_rl.composition.compose import compose
from async_rl.core.errors import ConfigError
from async_rl.core.machine import Machine, this_machine
from async_rl.launchers.cli import app
from async_rl.launchers.commands.migrate import to_yaml
from async_rl.launchers.migration.applying import Migration
from async_rl.launchers.migration.rules import read_table
from async_rl.launchers.migration.shared import SHARED
from async_rl.launchers.migration.sources import flat
from async_rl.launchers.migration.systems import FUNCTIONS, read
from async_rl.launchers.preflight.checks import preflight
from async_rl.planning.topology import processes

SOURCES = {"verl_first": VERL_FIRST, "verl_today": VERL_TODAY, "areal": AREAL}


def migrated(tmp_path: Path, text: str, key: str = "", value: Any = None) -> Migration:
    """The migration of a source, with one key set to another value."""
    tree = yaml.safe_load(text)
    if key:
        node = tree
        *parents, leaf = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    file = tmp_path / "source.yaml"
    file.write_text(yaml.safe_dump(tree))
    return read(file)


@pytest.mark.covers("keys of both systems")
@pytest.mark.parametrize("name", SOURCES)
def test_every_key_is_mentioned_once_and_the_result_is_accepted(tmp_path: Path, name: str) -> None:
    source = tmp_path / "source.yaml"
    source.write_text(SOURCES[name])
    migration = read(source)
    keys = [line.key for line in migration.lines if not line.key.endswith(" (absent)")]
    assert sorted(keys) == sorted(flat(yaml.safe_load(SOURCES[name])))
    assert not [
        line.key for line in migration.lines if line.fate.reason.startswith("no rule for it")
    ]
    assert all(
        line.fate.settings if line.fate.kind == "translated" else line.fate.reason
        for line in migration.lines
    )

    ours = tmp_path / "ours.yaml"
    ours.write_text(to_yaml(migration))
    compose(str(ours), ["num_steps=1"])


@pytest.mark.parametrize("name", SOURCES)
def test_a_launch_takes_the_result_where_files_and_gpus_are_there(
    tmp_path: Path, name: str
) -> None:
    source = tmp_path / "source.yaml"
    source.write_text(SOURCES[name])
    ours = tmp_path / "ours.yaml"
    ours.write_text(to_yaml(read(source)))
    row = {"query_id": "q0", "prompt": "add", "question": "add", "solutions": ["1"]}
    row["tests"] = [{"kind": "stdin", "input": "1", "output": "1"}]
    for file in ("rows.jsonl", "metadata.jsonl", "held_out.jsonl"):
        (tmp_path / file).write_text(json.dumps(row) + "\n")
    write_model(tmp_path)
    given = [
        f"model.path={tmp_path}",
        f"data.train_files={tmp_path}/rows.jsonl",
        f"output_dir={tmp_path}/runs",
    ]
    given += [
        f"data.metadata_file={tmp_path}/metadata.jsonl"
        if name == "areal"
        else f"data.val_files={tmp_path}/held_out.jsonl"
    ]
    machine = Machine(cores=tuple(this_machine().cores), num_gpus=8, memory_mb=1_000_000)
    config = compose(str(ours), given)
    preflight(config, machine)
    assert processes(config, machine)


def test_the_command_writes_a_file_that_it_does_not_overwrite_and_lists_the_keys(
    tmp_path: Path,
) -> None:
    source = tmp_path / "ppo_trainer.yaml"
    source.write_text(VERL_FIRST)
    result = CliRunner().invoke(app, ["migrate", str(source)])
    assert result.exit_code == 3, "keys were refused"
    assert "data.max_prompt_length=512  -> data.max_prompt_tokens=512" in result.output
    assert "trainer.nnodes=1  one machine" in result.output
    assert "refused: " in result.output
    assert (
        compose(str(tmp_path / "ppo_trainer.async_rl.yaml"), ["num_steps=1"]).buffer.groups_per_step
        == 1024
    )
    again = CliRunner().invoke(app, ["migrate", str(source)])
    assert isinstance(again.exception, ConfigError)
    assert "--output" in str(again.exception)


def test_a_file_of_neither_system_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("a: 1\n")
    with pytest.raises(ConfigError, match="verl: actor_rollout_ref"):
        read(file)


def test_a_key_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    [line] = [
        line for line in migrated(tmp_path, AREAL, "new_thing", 3).lines if line.key == "new_thing"
    ]
    assert line.fate.kind == "refused"


def test_every_function_of_a_table_exists_and_is_used() -> None:
    named = {name: read_table(name).rules.values() for name in FUNCTIONS}
    used = {name: {rule.code for rule in rules if rule.code} for name, rules in named.items()}
    assert {name: codes - SHARED.keys() for name, codes in used.items()} == {
        name: set(functions) for name, functions in FUNCTIONS.items()
    }
    assert set().union(*used.values()) >= SHARED.keys()


_A, _R, _F = (
    "actor_rollout_ref.actor.",
    "actor_rollout_ref.rollout.",
    "actor_rollout_ref.actor.fsdp_config.",
)
# Key, its other value, and what that becomes: settings of ours, or "defaulted", or "refused".
VERL_KEYS: list[tuple[str, Any, Any]] = [
    ("data.tokenizer", "other", {"data.tokenizer": "other"}),
    (
        "data.train_files",
        ["a.parquet", "hdfs://x/b.parquet"],
        {"data.train_files": ["a.parquet", "hdfs://x/b.parquet"]},
    ),
    ("data.val_files", "v.jsonl", {"data.val_files": ["v.jsonl"]}),
    ("data.prompt_key", "question", {"data.prompt_key": "question"}),
    ("data.prompt_id_key", "uid", {"data.id_key": "uid"}),
    ("data.max_prompt_id_length", 5, "defaulted"),
    ("data.max_prompt_length", 7, {"data.max_prompt_tokens": 7}),
    ("data.max_response_length", 9, {"data.max_response_tokens": 9}),
    ("data.truncation", "left", {"data.truncation": "left"}),
    ("data.truncation", "sideways", "refused"),
    ("data.train_batch_size", 512, {"buffer.groups_per_step": 512}),
    ("data.val_batch_size", 1, "defaulted"),
    ("data.return_raw_input_ids", True, "defaulted"),
    ("data.return_raw_chat", True, "defaulted"),
    ("actor_rollout_ref.hybrid_engine", False, {"placement": "disaggregated"}),
    ("actor_rollout_ref.hybrid_engine", True, "defaulted"),
    ("actor_rollout_ref.model.path", "a/b", {"model.path": "a/b"}),
    ("actor_rollout_ref.model.external_lib", "my.package", {"model.external_lib": "my.package"}),
    (
        "actor_rollout_ref.model.override_config",
        {"dropout": 0.1},
        {"model.override_config": ["dropout=0.1"]},
    ),
    (
        "actor_rollout_ref.model.enable_gradient_checkpointing",
        True,
        {"learner.gradient_checkpointing": True},
    ),
    (_A + "strategy", "megatron", "defaulted"),
    (_A + "ppo_mini_batch_size", 128, {"learner.minibatches": 8}),
    (_A + "ppo_mini_batch_size", 100, "refused"),
    (_A + "ppo_micro_batch_size", 1, "defaulted"),
    (_A + "grad_clip", 0.5, {"learner.optimizer.grad_clip": 0.5}),
    (
        _A + "clip_ratio",
        0.1,
        {"algorithm.policy_loss.clip_low": 0.1, "algorithm.policy_loss.clip_high": 0.1},
    ),
    (_A + "entropy_coeff", 0.0, {"algorithm.entropy_coef": 0.0}),
    (_A + "ppo_epochs", 3, {"learner.epochs": 3}),
    (_A + "shuffle", False, {}),
    (_A + "optim.lr", 3e-6, {"learner.optimizer.lr": 3e-6}),
    (_A + "optim.lr_warmup_steps_ratio", 0.1, "refused"),
    (_A + "optim.min_lr_ratio", 0.2, {"learner.optimizer.min_lr_ratio": 0.2}),
    (_A + "optim.warmup_style", "cosine", {"learner.optimizer.schedule": "cosine"}),
    (_A + "optim.total_training_steps", 100, "defaulted"),
    (_F + "wrap_policy.min_num_params", 1000, {"learner.shard_units": 1000}),
    (
        _F + "wrap_policy.transformer_layer_cls_to_wrap",
        ["Block", "Head"],
        {"learner.shard_units": ["Block", "Head"]},
    ),
    (
        _F + "wrap_policy.transformer_layer_cls_to_wrap",
        "Block",
        {"learner.shard_units": ["Block"]},
    ),
    (_F + "param_offload", True, {"learner.offload": "parameters"}),
    (_F + "grad_offload", True, {"learner.offload": "parameters"}),
    (_F + "optimizer_offload", True, {"learner.offload": "optimizer"}),
    (_A + "ulysses_sequence_parallel_size", 2, {"learner.context_ranks": 2}),
    ("actor_rollout_ref.ref.ulysses_sequence_parallel_size", 2, "defaulted"),
    ("critic.ulysses_sequence_parallel_size", 1, "defaulted"),
    ("actor_rollout_ref.ref.log_prob_micro_batch_size", 1, "defaulted"),
    (
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
        9000,
        {"learner.forward_budget_tokens": 9000},
    ),
    (_R + "log_prob_max_token_len_per_gpu", None, "defaulted"),
    ("actor_rollout_ref.ref.fsdp_config.param_offload", True, "refused"),
    (_R + "name", "hf", {"generation.engine": "hf"}),
    (_R + "name", "sglang", "refused"),
    (_R + "temperature", 0.7, {"generation.temperature": 0.7}),
    (_R + "top_k", 50, "refused"),
    (_R + "top_p", 0.9, "refused"),
    (_R + "do_sample", False, "refused"),
    (_R + "ignore_eos", True, {"data.longest": "responses"}),
    (_R + "n", 5, {"generation.group_size": 5}),
    (_R + "val_kwargs.n", 4, "refused"),
    (_R + "response_length", 3, "defaulted"),
    (_R + "dtype", "float32", {"model.dtype": "float32"}),
    (_R + "dtype", "float16", "refused"),
    (_R + "gpu_memory_utilization", 0.4, {"generation.vllm.gpu_memory_utilization": 0.4}),
    (_R + "enforce_eager", False, {"generation.vllm.enforce_eager": False}),
    (_R + "free_cache_engine", False, "defaulted"),
    (_R + "load_format", "auto", "defaulted"),
    (_R + "tensor_model_parallel_size", 4, {"generation.vllm.tensor_parallel_size": 4}),
    (_R + "max_num_batched_tokens", 99, {"generation.vllm.max_num_batched_tokens": 99}),
    (_R + "max_num_seqs", 98, {"generation.vllm.max_num_seqs": 98}),
    (_R + "log_prob_micro_batch_size", 1, "defaulted"),
    ("critic.optim.lr", 2e-5, {"algorithm.advantage.critic.lr": 2e-5}),
    ("critic.model.path", "other", "refused"),
    ("critic.ppo_mini_batch_size", 1, "refused"),
    ("critic.grad_clip", 2.0, "refused"),
    ("critic.cliprange_value", 0.1, {"algorithm.advantage.critic.value_clip": 0.1}),
    ("reward_model.enable", True, {"reward.terms.reward_model": "reward_model"}),
    ("reward_model.micro_batch_size", 1, "defaulted"),
    ("reward_model.max_length", 1, "defaulted"),
    ("reward_model.model.path", "m", "defaulted"),
    ("reward_model.model.input_tokenizer", None, "defaulted"),
    ("algorithm.gamma", 0.9, {"algorithm.advantage.gamma": 0.9}),
    ("algorithm.lam", 0.8, {"algorithm.advantage.gae_lambda": 0.8}),
    ("algorithm.adv_estimator", "grpo", {"algorithm.advantage": "grpo"}),
    ("algorithm.adv_estimator", "opo", "refused"),
    ("algorithm.kl_penalty", "kl", "defaulted"),
    ("algorithm.kl_penalty", "mse", "refused"),
    ("algorithm.kl_penalty", "full", "refused"),
    ("algorithm.kl_ctrl.type", "adaptive", {"algorithm.kl.controller": "adaptive"}),
    (
        "algorithm.kl_ctrl.kl_coef",
        0.2,
        {"algorithm.kl.coef": 0.2, "algorithm.kl": "reward"},
    ),
    ("trainer.total_epochs", 2, {"num_steps": None, "data.epochs": 2}),
    ("trainer.project_name", "p", "defaulted"),
    ("trainer.experiment_name", "e", {"run_name": "e"}),
    ("trainer.logger", ["console", "tensorboard"], {"monitoring.tensorboard_port": 0}),
    ("trainer.logger", ["console", "wandb"], {"monitoring.tensorboard_port": 0}),
    ("trainer.logger", ["console"], {"monitoring.tensorboard_port": None}),
    ("trainer.nnodes", 2, {"launcher": "ray", "launcher.nodes": 2, "launcher.gpus_per_node": 8}),
    (
        "trainer.n_gpus_per_node",
        4,
        {
            "generators.count": 1,
            "generators.gpus_each": 2,
            "learner.ranks": 2,
            "learner.gpus_each": 1,
        },
    ),
    ("trainer.save_freq", 7, {"checkpoint.every_steps": 7}),
    ("trainer.save_freq", -1, {"checkpoint.every_steps": 0}),
    ("trainer.test_freq", -1, {"evaluation.every_steps": 0}),
    ("trainer.critic_warmup", 3, {"algorithm.advantage.critic.warmup_steps": 3}),
    ("trainer.default_local_dir", "d", {"output_dir": "d"}),
    ("trainer.default_hdfs_dir", "hdfs://x", {"checkpoint.mirror": "hdfs://x"}),
]
AREAL_KEYS: list[tuple[str, Any, Any]] = [
    ("actor.path", "/m", {"model.path": "/m"}),
    ("critic.path", "/c", "refused"),
    ("ref.path", "/r", "refused"),
    ("rew.path", "/w", "defaulted"),
    ("actor.vllm.max_seq_len_to_capture", 1000, "refused"),
    ("actor.optimizer.beta2", 0.9, {"learner.optimizer.betas": [0.9, 0.9]}),
    ("actor_gen.mb_spec.max_tokens_per_mb", 1, "defaulted"),
    ("actor_train.mb_spec.max_tokens_per_mb", 4096, {"learner.budget_tokens": 4096}),
    ("critic_train.mb_spec.max_tokens_per_mb", 9000, {"learner.budget_tokens": 9000}),
    ("ref_inf.mb_spec.max_tokens_per_mb", 4096, {"learner.forward_budget_tokens": 4096}),
    ("critic_train.parallel.data_parallel_size", 2, "defaulted"),
    ("critic_inf.parallel.data_parallel_size", 2, "defaulted"),
    ("ref_inf.parallel.data_parallel_size", 2, "defaulted"),
    ("rew_inf.parallel.data_parallel_size", 2, "defaulted"),
    ("dataset.path", "/d.jsonl", {"data.train_files": ["/d.jsonl"], "evaluation.every_steps": 0}),
    ("dataset.max_prompt_len", 9, {"data.max_prompt_tokens": 9}),
    ("dataset.train_bs_n_seqs", 16, {"buffer.groups_per_step": 16}),
    ("dataset.fill_to_max_length", True, {"data.longest": "prompts"}),
    ("REAL_CODE_METADATA_PATH", "/x.jsonl", {"data.metadata_file": "/x.jsonl"}),
    ("FUNCTIONCALL_SERVICE_DOMAIN", "http://h:1", "defaulted"),
    ("ppo.gen.n", 2, "refused"),
    ("ppo.gen.max_new_tokens", 99, {"data.max_response_tokens": 99}),
    ("ppo.gen.min_new_tokens", 5, "refused"),
    ("ppo.gen.greedy", True, "refused"),
    ("ppo.gen.top_p", 0.5, "refused"),
    ("ppo.gen.top_k", 20, "refused"),
    ("ppo.gen.temperature", 0.5, {"generation.temperature": 0.5}),
    ("ppo.ppo_n_minibatches", 2, {"learner.minibatches": 2}),
    (
        "ppo.kl_ctl",
        0.0,
        {"algorithm.kl": "none"},
    ),
    ("ppo.discount", 0.9, {"algorithm.advantage.gamma": 0.9}),
    ("ppo.gae_lambda", 0.9, {"algorithm.advantage.gae_lambda": 0.9}),
    (
        "ppo.eps_clip",
        0.1,
        {"algorithm.policy_loss.clip_low": 0.1, "algorithm.policy_loss.clip_high": 0.1},
    ),
    ("ppo.value_eps_clip", 0.1, {"algorithm.advantage.critic.value_clip": 0.1}),
    (
        "ppo.disable_value",
        True,
        {"algorithm.advantage": "reinforce_plus_plus"},
    ),
    ("ppo.max_reward_clip", 5.0, {"reward.clip": 5.0}),
    ("ppo.reward_output_scaling", 2.0, {"reward.scale": 2.0}),
    ("ppo.reward_output_bias", 0.5, {"reward.bias": 0.5}),
    ("ppo.early_stop_imp_ratio", 3.0, {"algorithm.policy_loss.max_mean_ratio": 3.0}),
    ("ppo.use_adaptive_kl_ctl", True, {"algorithm.kl.controller": "adaptive"}),
    ("ppo.adv_norm", False, {"algorithm.normalize_advantages": "none"}),
    ("ppo.value_norm", False, {"algorithm.advantage.critic.value_norm": "none"}),
    ("ppo.value_norm_beta", 0.9, "refused"),
    ("ppo.value_norm_eps", 0.1, "refused"),
    ("group_size", 4, {"generation.group_size": 4}),
    ("generation_size", 16, {"generation.generation_size": 16}),
    ("mask_no_eos_with_zero", True, {"algorithm.truncated": "zero_reward"}),
    ("mask_too_long", True, {"algorithm.truncated": "mask"}),
    ("rm_output_scaling", 2.0, "defaulted"),
    ("ref_ema_eta", 0.1, {"algorithm.kl.ref_ema_eta": 0.1}),
    ("rw_type", "dense", "defaulted"),
    ("task", "math", {"reward.pass_reward": 1.0, "reward.fail_reward": -1.0}),
    ("task", "chess", "refused"),
    ("check_xml_format", True, {"reward.format_reward": -0.8}),
    ("use_dense_reward", True, {"reward.placement": "step_deltas"}),
    ("reward_delta", False, "defaulted"),
    ("check_verifier_status", True, {"reward.stop_on": ["all_failed"]}),
    ("check_verifier_status", False, {"reward.stop_on": []}),
    ("n_nodes", 2, {"launcher": "ray", "launcher.nodes": 2, "launcher.gpus_per_node": 8}),
    ("wandb.mode", "disabled", "defaulted"),
    ("dataset_filter_threshold", 0.9, {"data.filter.above": None}),
    ("dataset_max_filter_percentage", 0.5, "defaulted"),
    ("exp_ctrl.total_train_epochs", 3, {"num_steps": None, "data.epochs": 3}),
    ("exp_ctrl.save_freq_secs", 600, {"checkpoint.every_minutes": 10.0}),
]


@pytest.mark.covers("do_sample", "free_cache_engine", "hybrid_engine", "default_local_dir")
@pytest.mark.parametrize(
    ("text", "key", "value", "expected"),
    [(VERL_FIRST, *row) for row in VERL_KEYS] + [(AREAL, *row) for row in AREAL_KEYS],
    ids=[f"{key}={value}" for key, value, _ in VERL_KEYS + AREAL_KEYS],
)
def test_another_value_of_a_key_has_its_own_fate(
    tmp_path: Path, text: str, key: str, value: Any, expected: Any
) -> None:
    lines = [
        line
        for line in migrated(tmp_path, text, key, value).lines
        if line.key == key or line.key.startswith(f"{key}.")
    ]
    assert lines
    for line in lines:
        assert (line.fate.settings if isinstance(expected, dict) else line.fate.kind) == expected


@pytest.mark.parametrize(
    ("text", "key", "value", "path", "expected"),
    [
        (AREAL, "group_adv_norm", True, "algorithm.normalize_advantages", "group"),
        (AREAL, "group_adv_norm", False, "algorithm.normalize_advantages", "batch"),
        (AREAL, "ppo.value_norm_type", "ma", "algorithm.advantage.critic.value_norm", "ma"),
        (AREAL, "task", "code", "reward.fail_reward", -1.0),
        (AREAL, "dataset_max_filter_percentage", 0.5, "data.filter.above", None),
        (VERL_TODAY, "algorithm.norm_adv_by_std_in_grpo", False, "algorithm.advantage", "dr_grpo"),
        (VERL_TODAY, f"{_A}use_kl_loss", False, "algorithm.kl", "none"),
        (VERL_TODAY, f"{_A}kl_loss_coef", 0.5, "algorithm.kl.coef", 0.5),
        (VERL_TODAY, "algorithm.use_kl_in_reward", True, "algorithm.kl", "reward"),
        (VERL_TODAY, "data.filter_overlong_prompts", True, "data.truncation", "drop"),
        (VERL_TODAY, f"{_R}val_kwargs.temperature", 0.6, "evaluation.temperature", 0.0),
        (
            VERL_TODAY,
            f"{_R}val_kwargs",
            {"temperature": 0.6, "do_sample": True},
            "evaluation.temperature",
            0.6,
        ),
        (VERL_TODAY, f"{_R}val_kwargs", {"n": 4, "do_sample": True}, "evaluation.num_samples", 4),
        (
            VERL_TODAY,
            f"{_A}optim.lr_warmup_steps_ratio",
            0.05,
            "learner.optimizer.warmup_steps",
            10,
        ),
    ],
)
def test_keys_that_decide_together_give_one_setting(
    tmp_path: Path, text: str, key: str, value: Any, path: str, expected: Any
) -> None:
    assert migrated(tmp_path, text, key, value).settings[path] == expected


@pytest.mark.parametrize(("share", "above"), [(0.0, None), (0.25, 0.9), (1.0, 0.9)])
def test_prompts_leave_by_their_score_where_a_share_of_them_may(
    tmp_path: Path, share: float, above: float | None
) -> None:
    source = AREAL.replace(
        "dataset_max_filter_percentage: 0.0", f"dataset_max_filter_percentage: {share}"
    )
    settings = migrated(tmp_path, source, "dataset_filter_threshold", 0.9).settings
    assert settings["data.filter.above"] == above
    assert settings.get("data.filter.max_share") == (share or None)


@pytest.mark.covers("project_name, logger: wandb")
@pytest.mark.parametrize("is_installed", [True, False])
def test_numbers_go_to_wandb_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_installed: bool
) -> None:
    monkeypatch.setattr(
        "async_rl.launchers.migration.shared.find_spec",
        lambda name: object() if is_installed else None,
    )
    of_verl = migrated(tmp_path, VERL_FIRST, "trainer.logger", ["console", "wandb"])
    [line] = [line for line in of_verl.lines if line.key == "trainer.logger"]
    of_areal = migrated(tmp_path, AREAL, "wandb", {"mode": "online", "project": "mine"})
    found = (
        line.fate.kind,
        of_verl.settings.get("monitoring.wandb"),
        of_areal.settings.get("monitoring.wandb"),
    )
    assert found == (
        ("translated", "verl_examples", "mine") if is_installed else ("refused", None, None)
    )
    assert (of_verl.settings["monitoring.tensorboard_port"] is None) is is_installed


def test_settings_of_a_critic_have_no_effect_where_the_advantage_needs_none(tmp_path: Path) -> None:
    lines = migrated(tmp_path, VERL_FIRST, "algorithm.adv_estimator", "grpo").lines
    fates = {line.key: line.fate.kind for line in lines}
    assert {
        fates[key] for key in ("critic.cliprange_value", "algorithm.lam", "trainer.critic_warmup")
    } == {"defaulted"}


def test_half_of_the_gpus_generate_and_half_train(tmp_path: Path) -> None:
    settings = migrated(tmp_path, VERL_FIRST).settings
    generating = settings["generators.count"] * settings["generators.gpus_each"]
    assert math.isclose(generating, 4)
    assert settings["learner.ranks"] * settings["learner.gpus_each"] == 4


def test_the_settings_of_a_reward_model_are_carried_over_where_it_is_enabled(
    tmp_path: Path,
) -> None:
    model = {"path": "/rm", "input_tokenizer": "/policy"}
    for enabled in (True, False):
        value = {"enable": enabled, "model": model, "micro_batch_size": 4, "max_length": 512}
        settings = migrated(tmp_path, VERL_FIRST, "reward_model", value).settings
        wanted = {
            "reward.terms.reward_model": "reward_model",
            "reward.terms.reward_model.path": "/rm",
            "reward.terms.reward_model.batch_size": 4,
            "reward.terms.reward_model.max_tokens": 512,
        }
        assert {path: settings.get(path) for path in wanted} == (
            wanted if enabled else dict.fromkeys(wanted)
        )
