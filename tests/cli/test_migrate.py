"""`async-rl migrate`: no key goes unmentioned, and each setting of a key has its own fate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from inspect import isfunction, signature
from pathlib import Path
from typing import Any

import pytest
import yaml
from migration_support import FOLDER, SOURCES, changed, check_answers, check_launch, migrated
from tables import table
from typer.testing import CliRunner

from async_rl.composition.compose import compose
from async_rl.core.errors import ConfigError
from async_rl.launchers.cli import application
from async_rl.launchers.commands.migrate import REFUSED
from async_rl.launchers.migration.applying import SYSTEMS, arguments, read
from async_rl.launchers.migration.rules import read_table

VERL = "verl_first"
AREAL = "areal_first"


@pytest.mark.covers("keys of both systems")
@pytest.mark.parametrize("name", SOURCES)
def test_every_key_is_answered_once_and_the_result_can_be_launched(
    tmp_path: Path, name: str
) -> None:
    migration = migrated(name)
    check_answers(migration)
    check_launch(tmp_path, migration)
    keys = [line.key for line in migration.lines]
    if name.endswith(".yaml"):
        source = yaml.safe_load((FOLDER / name).read_text())
        added = (" (absent)", "every run of verl", "every run of AReaL before 1.0")
        assert not set(leaves(source)) - set(keys)
        assert len(keys) == len(set(keys))
        assert name == "areal.yaml" or sorted(leaves(source)) == sorted(
            key for key in keys if not key.endswith(added)
        )


def leaves(tree: Any, prefix: str = "") -> Iterator[str]:
    if not isinstance(tree, dict) or not tree:
        yield prefix
        return
    for name, value in tree.items():
        yield from leaves(value, f"{prefix}.{name}" if prefix else name)


EXPECTED: dict[str, dict[str, Any]] = table(__file__, "expected")


@pytest.mark.parametrize("name", EXPECTED)
def test_the_counterpart_of_a_key_is_written(name: str) -> None:
    settings = migrated(name).settings
    assert {path: settings.get(path) for path in EXPECTED[name]} == EXPECTED[name]


def test_the_command_writes_a_file_that_it_does_not_overwrite_and_lists_the_keys(
    tmp_path: Path,
) -> None:
    source = tmp_path / "ppo_trainer.yaml"
    source.write_text((FOLDER / "verl_first.yaml").read_text())
    result = CliRunner().invoke(application(), ["migrate", str(source)])
    assert result.exit_code == REFUSED == 3, "keys were refused"
    assert "data.max_prompt_length=512  -> data.max_prompt_tokens=512" in result.output
    assert "trainer.nnodes=1  one machine" in result.output
    assert "otherwise than the source: " in result.output
    ours = compose(str(tmp_path / "ppo_trainer.async_rl.yaml"), ["num_steps=1"])
    assert ours.buffer.groups_per_step == 1024
    again = CliRunner().invoke(application(), ["migrate", str(source)])
    assert isinstance(again.exception, ConfigError)
    assert "--output" in str(again.exception)
    words = ["migrate", str(FOLDER / "verl.sh"), "--output", str(tmp_path / "a.yaml")]
    assert CliRunner().invoke(application(), words).exit_code == 0
    source.write_text("a: 1\n")
    with pytest.raises(ConfigError, match=r"docs/migrate\.md"):
        read(source)


def rule_functions(module: str) -> set[str]:
    """Return the functions of a module of the package that decide a rule."""
    members = vars(import_module(f"async_rl.launchers.migration.{module}"))
    return {
        name
        for name, value in members.items()
        if isfunction(value)
        and value.__module__.endswith(f".{module}")
        and signature(value).parameters.keys() == {"given"}
        and not name.startswith("_")
    }


def test_every_function_of_a_table_exists_and_is_used() -> None:
    shared = rule_functions("shared")
    named = {name: {rule.code for rule in read_table(name).rules.values()} for name in SYSTEMS}
    for name, codes in named.items():
        assert codes - shared - {""} == rule_functions(name)
        table = read_table(name)
        assert {rule.if_ for rule in table.rules.values()} - {""} <= table.conditions.keys()
    assert set().union(*named.values()) >= shared


# Groups of keys that do not decide about each other: key, its other value, and what that becomes:
# settings of ours, or "defaulted", or "refused".
FATES = [(name, group) for name in (VERL, AREAL) for group in table(__file__, name)]


@pytest.mark.covers("do_sample", "free_cache_engine", "hybrid_engine", "default_local_dir")
@pytest.mark.parametrize(("name", "group"), FATES, ids=[group[0][0] for _, group in FATES])
def test_another_value_of_a_key_has_its_own_fate(
    tmp_path: Path, name: str, group: list[tuple[str, Any, Any]]
) -> None:
    all_lines = changed(tmp_path, name, {key: value for key, value, _ in group}).lines
    for key, value, expected in group:
        lines = [line for line in all_lines if f"{line.key}.".startswith(f"{key}.")]
        assert lines, key
        for line in lines:
            found = line.fate.settings if isinstance(expected, dict) else line.fate.kind
            assert found == expected, (key, value)


@pytest.mark.parametrize(("name", "key", "value", "path", "expected"), table(__file__, "together"))
def test_keys_that_decide_together_give_one_setting(
    tmp_path: Path, name: str, key: str, value: Any, path: str, expected: Any
) -> None:
    assert changed(tmp_path, name, {key: value}).settings[path] == expected


def test_no_key_that_changes_results_is_answered_as_neutral() -> None:
    given = dict(table(__file__, "not_neutral"))
    words = [f"{key}={json.dumps(value)}" for key, value in given.items()]
    fates = {line.key: line.fate for line in migrated("verl.sh", words).lines}
    for key in given:
        kinds = {fate.kind for name, fate in fates.items() if name.startswith(key)}
        assert kinds == {"refused"}, key


@pytest.mark.parametrize(("contexts", "ranks"), [(1, 1), (2, None)])
def test_more_ranks_than_groups_leave_a_file_that_can_be_launched(
    tmp_path: Path, contexts: int, ranks: int | None
) -> None:
    """A file of AReaL 2.0.0 (examples/swe) has 4 nodes of 8 GPUs, and 4 prompts a batch."""
    file = tmp_path / "source.yaml"
    file.write_text(table(__file__, "swe").replace("CONTEXTS", str(contexts)))
    migration = read(file)
    settings = migration.settings
    assert (settings.get("learner.ranks"), settings["learner.context_ranks"]) == (ranks, contexts)
    [line] = [line for line in migration.lines if line.key == "actor.backend"]
    assert line.fate.kind == "refused"


def test_a_critic_of_areal_is_a_critic_and_a_share_of_its_epochs_is_refused() -> None:
    words = ["total_train_steps=100", "actor.optimizer.warmup_steps_proportion=0.1"]
    migration = migrated("areal.yaml", [*words, "critic.path=org/model", "critic.eps_clip=0.4"])
    assert (migration.base, migration.settings["algorithm.advantage"]) == ("ppo_code", "gae")
    assert migration.settings["algorithm.advantage.critic.value_clip"] == 0.4
    [line] = [line for line in migration.lines if line.key.endswith("_proportion")]
    # It is no share of the steps that are trained.
    assert (line.fate.kind, line.fate.settings) == ("refused", {})


@pytest.mark.parametrize(("share", "above"), [(0.0, None), (0.25, 0.9)])
def test_prompts_leave_by_their_score_where_a_share_of_them_may(
    share: float, above: float | None
) -> None:
    given = [f"dataset_max_filter_percentage={share}", "dataset_filter_threshold=0.9"]
    settings = migrated("areal_first.yaml", given).settings
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
    of_verl = changed(tmp_path, VERL, {"trainer.logger": ["console", "wandb"]})
    [line] = [line for line in of_verl.lines if line.key == "trainer.logger"]
    of_areal = changed(tmp_path, AREAL, {"wandb": {"mode": "online", "project": "mine"}})
    wandb = [each.settings.get("monitoring.wandb") for each in (of_verl, of_areal)]
    assert (line.fate.kind, wandb) == (
        ("translated", ["verl_examples", "mine"]) if is_installed else ("refused", [None] * 2)
    )


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_reward_model_is_carried_over_where_it_is_enabled_and_no_critic_without_its_advantage(
    tmp_path: Path, is_enabled: bool
) -> None:
    model = {"path": "/rm", "input_tokenizer": "/policy"}
    value = {"enable": is_enabled, "model": model, "micro_batch_size": 4, "max_length": 512}
    given = {"reward_model": value, "algorithm.adv_estimator": "grpo", "new_thing": 3}
    migration = changed(tmp_path, VERL, given)
    wanted = {
        "reward.terms.reward_model": "reward_model",
        "reward.terms.reward_model.path": "/rm",
        "reward.terms.reward_model.batch_size": 4,
        "reward.terms.reward_model.max_tokens": 512,
    }
    found = {path: migration.settings.get(path) for path in wanted}
    assert found == (wanted if is_enabled else dict.fromkeys(wanted))
    fates = {line.key: line.fate.kind for line in migration.lines}
    assert fates["new_thing"] == "refused", "a key that nobody knows"
    of_critic = ("critic.cliprange_value", "algorithm.lam", "trainer.critic_warmup")
    assert {fates[key] for key in of_critic} == {"defaulted"}


@pytest.mark.parametrize(("name", "given"), table(__file__, "adapters_and_dynamic_sampling_are"))
def test_adapters_and_dynamic_sampling_are_translated(name: str, given: list[str]) -> None:
    settings = migrated(name, given).settings
    assert (settings["model.lora"], settings["model.lora.rank"]) == ("lora", 8)
    assert settings["buffer.uniform_groups"] == "replace"


def test_a_quantized_engine_is_translated_where_its_rounding_is_corrected() -> None:
    fp8 = "actor_rollout_ref.rollout.quantization=fp8"
    is_token = "algorithm.rollout_correction.rollout_is=token"
    settings = migrated("verl.sh", [fp8, is_token]).settings
    assert settings["generation.vllm.extra"] == ["quantization=fp8_per_block"]
    [line] = [line for line in migrated("verl.sh", [fp8]).lines if line.key in fp8]
    assert (line.fate.kind, line.fate.settings) == ("refused", {})
    assert "algorithm.policy_loss.correction=none: the weights that draw" in line.fate.reason


@pytest.mark.parametrize(("name", "words"), table(__file__, "fused_layers_of_megatron_become"))
def test_fused_layers_of_megatron_become_the_layers_of_the_model(
    name: str, words: list[str]
) -> None:
    *others, key = words
    settings = migrated(name, [*others, f"{key}=[linear_qkv,linear_fc2,router]"]).settings
    assert settings["model.lora.targets"] == ["q_proj", "k_proj", "v_proj", "down_proj", "router"]
    every = f"{key}=[linear_qkv,linear_proj,linear_fc1,linear_fc2]"
    whole = migrated(name, [*others, every]).settings
    assert len(whole["model.lora.targets"]) == 7


def test_the_arguments_of_a_command_are_read() -> None:
    words = ["--one", "x/y", "--many", "1", "2.5", "--switch", "a.b=[1,2]", "+c=null", "--d=e"]
    assert arguments(words) == {
        "one": "x/y",
        "many": [1, 2.5],
        "switch": True,
        "a.b": [1, 2],
        "c": None,
        "d": "e",
    }
