"""`async-rl migrate`: no key goes unmentioned, and each setting of a key has its own fate."""

import ast
import dataclasses
import json
from collections.abc import Iterator
from importlib import import_module
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
from async_rl.launchers.migration import shared
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


def test_a_rule_names_functions_and_conditions_that_exist() -> None:
    for name in SYSTEMS:
        rules = read_table(name)
        known = vars(shared) | vars(
            import_module(f"async_rl.launchers.migration.{name.partition('_')[0]}")
        )
        assert {rule.code for rule in rules.rules.values()} - {""} <= known.keys()
        assert {rule.if_ for rule in rules.rules.values()} - {""} <= rules.conditions.keys()


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


@pytest.mark.parametrize(("name", "words", "expected"), table(__file__, "words"))
def test_keys_of_a_file_and_words_of_a_command_become_settings(
    name: str, words: list[str], expected: dict[str, Any]
) -> None:
    settings = migrated(name, words).settings
    assert {path: settings.get(path) for path in expected} == expected


@pytest.mark.parametrize(("name", "words", "key"), table(__file__, "refused_beside_others"))
def test_a_key_is_refused_where_the_others_leave_it_no_counterpart(
    name: str, words: list[str], key: str
) -> None:
    [line] = [line for line in migrated(name, words).lines if line.key == key]
    assert (line.fate.kind, line.fate.settings) == ("refused", {})


def test_no_key_that_changes_results_is_answered_as_neutral() -> None:
    given = dict(table(__file__, "not_neutral"))
    words = [f"{key}={json.dumps(value)}" for key, value in given.items()]
    fates = {line.key: line.fate for line in migrated("verl.sh", words).lines}
    for key in given:
        kinds = {fate.kind for name, fate in fates.items() if name.startswith(key)}
        assert kinds == {"refused"}, key


def test_more_ranks_than_groups_leave_a_file_that_can_be_launched(tmp_path: Path) -> None:
    """A file of AReaL 2.0.0 (examples/swe) has 4 nodes of 8 GPUs, and 4 prompts a batch."""
    file = tmp_path / "source.yaml"
    file.write_text(table(__file__, "swe"))
    migration = read(file)
    assert migration.settings["learner.ranks"] == migration.settings["learner.context_ranks"] == 1
    [line] = [line for line in migration.lines if line.key == "actor.backend"]
    assert line.fate.kind == "refused"


@pytest.mark.covers("project_name, logger: wandb")
def test_numbers_go_to_wandb_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_rl.launchers.migration.shared.find_spec", lambda name: object())
    of_verl = changed(tmp_path, VERL, {"trainer.logger": ["console", "wandb"]})
    of_areal = changed(tmp_path, AREAL, {"wandb": {"mode": "online", "project": "mine"}})
    projects = [each.settings.get("monitoring.wandb") for each in (of_verl, of_areal)]
    assert projects == ["verl_examples", "mine"]


def test_a_reward_model_is_carried_over_and_no_critic_without_its_advantage(tmp_path: Path) -> None:
    model = {"path": "/rm", "input_tokenizer": "/policy"}
    value = {"enable": True, "model": model, "micro_batch_size": 4, "max_length": 512}
    given = {"reward_model": value, "algorithm.adv_estimator": "grpo", "new_thing": 3}
    migration = changed(tmp_path, VERL, given)
    term = "reward.terms.reward_model"
    found = [
        migration.settings[f"{term}{name}"] for name in ("", ".path", ".batch_size", ".max_tokens")
    ]
    assert found == ["reward_model", "/rm", 4, 512]
    fates = {line.key: line.fate.kind for line in migration.lines}
    assert fates["new_thing"] == "refused", "a key that nobody knows"
    of_critic = ("critic.cliprange_value", "algorithm.lam", "trainer.critic_warmup")
    assert {fates[key] for key in of_critic} == {"defaulted"}


def test_the_arguments_of_a_command_are_read() -> None:
    words = ["--one", "x/y", "--many", "1", "2.5", "--switch", "a.b=[1,2]", "+c=null", "--d=e"]
    expected = {"one": "x/y", "many": [1, 2.5], "switch": True, "a.b": [1, 2], "c": None, "d": "e"}
    assert arguments(words) == expected


PACKAGES = Path(__file__).parents[2] / "build" / "adapters"


def real(path: Path) -> Path:
    if not path.exists():
        pytest.skip(f"{path.name} belongs to a package that `make adapters` installs")
    return path


VERL_FILES = [
    PACKAGES / "verl/trainer/config/ppo_trainer.yaml",
    PACKAGES / "verl/experimental/fully_async_policy/config/fully_async_ppo_trainer.yaml",
]


@pytest.mark.parametrize("file", VERL_FILES, ids=lambda file: file.stem)
def test_every_key_of_a_file_of_verl_is_answered(tmp_path: Path, file: Path) -> None:
    migration = read(real(file))
    check_answers(migration)
    assert len(migration.lines) > (70 if "async" in file.stem else 700), "hydra composes the parts"
    check_launch(tmp_path, migration)


def test_every_field_of_grpo_config_is_answered(tmp_path: Path) -> None:
    tree = ast.parse(real(PACKAGES / "trl/trainer/grpo_config.py").read_text())
    from transformers import TrainingArguments

    [config] = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    source: dict[str, Any] = {
        field.name: field.default
        for field in dataclasses.fields(TrainingArguments)
        if field.default is not dataclasses.MISSING
    }
    source["lr_scheduler_type"] = "linear"
    for node in config.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
            given = [word.value for word in node.value.keywords if word.arg == "default"]
            source[ast.unparse(node.target)] = ast.literal_eval(given[0])
    file = tmp_path / "config.json"
    file.write_text(json.dumps(source, default=str))
    migration = read(file)
    assert len(migration.lines) > 150
    check_answers(migration)
    check_launch(tmp_path, migration)
