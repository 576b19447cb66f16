"""Facts about `async-rl migrate` on what other trainers use today: their files, and small ones of
our own with the same keys.
"""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from empty_model import write_model
from migration_of_today import AREAL_NOW, OPENRLHF, PRIME_RL, TRL_ARGUMENTS, VERL_SCRIPT
from typer.testing import CliRunner

from async_rl.composition.compose import compose
from async_rl.core.errors import ConfigError
from async_rl.core.machine import Machine, this_machine
from async_rl.launchers.cli import app
from async_rl.launchers.commands.migrate import REFUSED, to_yaml
from async_rl.launchers.migration.applying import Migration
from async_rl.launchers.migration.sources import arguments, read_source
from async_rl.launchers.migration.systems import read
from async_rl.launchers.preflight.checks import preflight
from async_rl.planning.topology import processes

PACKAGES = Path(__file__).parents[2] / "build" / "adapters"
CONFIGURATIONS = PACKAGES / "verl" / "trainer" / "config"
SOURCES = {
    "areal.yaml": AREAL_NOW,
    "rl.toml": PRIME_RL,
    "openrlhf.sh": OPENRLHF,
    "trl.sh": TRL_ARGUMENTS,
    "verl.sh": VERL_SCRIPT,
}


def real(path: Path) -> Path:
    if not path.exists():
        pytest.skip(f"{path.name} belongs to a package that `make adapters` installs")
    return path


def migrated(tmp_path: Path, name: str, *overrides: str) -> Migration:
    file = tmp_path / name
    file.write_text(SOURCES[name])
    return read(file, overrides)


def unanswered(migration: Migration) -> list[str]:
    return [line.key for line in migration.lines if "no rule for it" in line.fate.reason]


def launched(tmp_path: Path, migration: Migration) -> None:
    """Checks what a launch checks, with a model and rows of this machine and with 16 GPUs."""
    ours = tmp_path / "ours.yaml"
    ours.write_text(to_yaml(migration))
    row = {
        "prompt": "add",
        "input": "add",
        "tests": [{"kind": "stdin", "input": "1", "output": "1"}],
    }
    for name in ("rows.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    write_model(tmp_path)
    given = [
        f"model.path={tmp_path}",
        f"data.train_files={tmp_path}/rows.jsonl",
        f"data.val_files={tmp_path}/held_out.jsonl",
        f"output_dir={tmp_path}/runs",
    ]
    machine = Machine(cores=tuple(this_machine().cores), num_gpus=16, memory_mb=1_000_000)
    config = compose(str(ours), given)
    preflight(config, machine)
    assert processes(config, machine)


@pytest.mark.parametrize("name", SOURCES)
def test_a_configuration_of_today_is_answered_and_can_be_launched(
    tmp_path: Path, name: str
) -> None:
    migration = migrated(tmp_path, name)
    assert unanswered(migration) == []
    assert all(
        line.fate.settings if line.fate.kind == "translated" else line.fate.reason
        for line in migration.lines
    )
    launched(tmp_path, migration)


EXPECTED: dict[str, dict[str, Any]] = {
    "areal.yaml": {
        "algorithm.advantage": "grpo",
        "algorithm.normalize_advantages": "batch",
        "algorithm.policy_loss.correction": "token_mis",
        "algorithm.policy_loss.correction.max": 5.0,
        "buffer.max_staleness_versions": 3,
        "buffer.groups_per_step": 64,
        "generators.count": 2,
        "generators.gpus_each": 2,
        "learner.ranks": 4,
        "learner.optimizer.betas": [0.9, 0.98],
        "reward.bias": 0.5,
        "evaluation.every_steps": 5,
        "checkpoint.every_minutes": 10.0,
        "data.truncation": "drop",
    },
    "rl.toml": {
        "num_steps": 40,
        "buffer.groups_per_step": 8,
        "buffer.max_staleness_versions": 4,
        "data.max_prompt_tokens": 1536,
        "data.max_response_tokens": 512,
        "generators.count": 2,
        "generators.gpus_each": 2,
        "learner.ranks": 2,
        "learner.optimizer.schedule": "cosine",
        "learner.optimizer.min_lr_ratio": 0.1,
        "algorithm.policy_loss": "dppo",
    },
    "openrlhf.sh": {
        "model.path": "/models/policy",
        "algorithm.advantage": "grpo",
        "algorithm.kl": "loss",
        "algorithm.kl.estimator": "k3",
        "algorithm.policy_loss.clip_high": 0.27,
        "algorithm.policy_loss.correction": "token_mis",
        "algorithm.policy_loss.correction.min": 0.5,
        "learner.minibatches": 2,
        "buffer.max_staleness_versions": 2,
    },
    "trl.sh": {
        "num_steps": 50,
        "buffer.groups_per_step": 8,
        "algorithm.kl.coef": 0.01,
        "algorithm.policy_loss.clip_low": 0.2,
        "algorithm.policy_loss.clip_high": 0.28,
        "model.dtype": "bfloat16",
        "algorithm.policy_loss.correction": "sequence_mis",
    },
    "verl.sh": {
        "algorithm.advantage": "grpo",
        "algorithm.kl": "loss",
        "buffer.groups_per_step": 64,
        "learner.minibatches": 2,
        "generation.group_size": 5,
        "generators.count": 1,
        "learner.ranks": 1,
    },
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_counterpart_of_a_key_is_written(tmp_path: Path, name: str) -> None:
    settings = migrated(tmp_path, name).settings
    assert {path: settings.get(path) for path in EXPECTED[name]} == EXPECTED[name]


def test_a_critic_of_areal_is_a_critic_here(tmp_path: Path) -> None:
    migration = migrated(tmp_path, "areal.yaml", "critic.path=org/model", "critic.eps_clip=0.4")
    assert (migration.base, migration.settings["algorithm.advantage"]) == ("ppo_code", "gae")
    assert migration.settings["algorithm.advantage.critic.value_clip"] == 0.4


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("verl.sh", ["actor_rollout_ref.model.lora_rank=8", "algorithm.filter_groups.enable=true"]),
        ("areal.yaml", ["actor.use_lora=true", "actor.lora_rank=8", "dynamic_bs=true"]),
        ("openrlhf.sh", ["ds.lora.rank=8", "algo.dynamic_filtering_enable=true"]),
    ],
)
def test_adapters_and_dynamic_sampling_are_translated(
    tmp_path: Path, name: str, given: list[str]
) -> None:
    settings = migrated(tmp_path, name, *given).settings
    assert (settings["model.lora"], settings["model.lora.rank"]) == ("lora", 8)
    assert settings["buffer.uniform_groups"] == "replace"


def test_keys_that_are_refused_end_the_command_with_another_status(tmp_path: Path) -> None:
    file = tmp_path / "verl.sh"
    file.write_text(VERL_SCRIPT)
    run = CliRunner().invoke
    assert run(app, ["migrate", str(file), "--output", str(tmp_path / "a.yaml")]).exit_code == 0
    more = ["actor_rollout_ref.rollout.top_k=50", "--output", str(tmp_path / "b.yaml")]
    assert run(app, ["migrate", str(file), *more]).exit_code == REFUSED


def test_a_command_line_is_read_as_a_shell_splits_it() -> None:
    text = "A=x\nrun --one $A/y --many 1 2.5 --switch \\\n  a.b='[1, 2]' +c=null --d=e # no\n"
    assert arguments(text) == {
        "one": "x/y",
        "many": [1, 2.5],
        "switch": True,
        "a.b": [1, 2],
        "c": None,
        "d": "e",
    }


VERL_FILES = [
    CONFIGURATIONS / "_generated_ppo_trainer.yaml",
    CONFIGURATIONS / "ppo_trainer.yaml",
    PACKAGES / "verl/experimental/fully_async_policy/config/fully_async_ppo_trainer.yaml",
]


@pytest.mark.parametrize("file", VERL_FILES, ids=lambda file: file.stem)
def test_every_key_of_a_file_of_verl_is_answered(tmp_path: Path, file: Path) -> None:
    migration = read(real(file))
    assert unanswered(migration) == []
    assert len(migration.lines) > 700, "hydra composes what the file only names"
    launched(tmp_path, migration)


def test_the_settings_of_asynchronous_training_have_counterparts() -> None:
    settings = read(real(VERL_FILES[2])).settings
    expected = {
        "buffer.groups_per_step": 256,
        "buffer.max_staleness_versions": 4,
        "weights.push_every_steps": 4,
        "algorithm.policy_loss": "ppo_vanilla",
        "generation.max_concurrent_groups": 16,
        "generators.count": 4,
        "learner.ranks": 8,
    }
    assert {path: settings.get(path) for path in expected} == expected


# Keys that are answered as having no effect only at the value that the source has by default.
NOT_NEUTRAL = [
    ("actor_rollout_ref.actor.use_rollout_log_probs", False),
    ("actor_rollout_ref.actor.optim.optimizer", "SGD"),
    ("actor_rollout_ref.actor.optim.override_optimizer_config", {"amsgrad": True}),
    ("actor_rollout_ref.rollout.quantization", "fp8"),
    ("actor_rollout_ref.rollout.dtype", "float16"),
    ("actor_rollout_ref.actor.fsdp_config.model_dtype", "bf16"),
    ("actor_rollout_ref.actor.qat.enable", True),
    ("actor_rollout_ref.rollout.multi_turn.enable", True),
    ("data.tool_config_path", "tools.yaml"),
    ("data.image_key", "pictures"),
    ("trainer.val_before_train", True),
    ("actor_rollout_ref.actor.fsdp_config.full_determinism", True),
    ("actor_rollout_ref.rollout.full_determinism", True),
    ("distillation.enabled", True),
    ("custom_reward_function.path", "score.py"),
    ("critic.model.path", "another"),
]


@pytest.mark.parametrize(("key", "value"), NOT_NEUTRAL, ids=[key for key, _ in NOT_NEUTRAL])
def test_no_key_that_changes_results_is_answered_as_neutral(
    tmp_path: Path, key: str, value: Any
) -> None:
    file = tmp_path / "verl.sh"
    file.write_text(f"{VERL_SCRIPT.rstrip()} {key}={json.dumps(value)!r}")
    fates = {line.key: line.fate for line in read(file).lines if line.key.startswith(key)}
    assert {fate.kind for fate in fates.values()} == {"refused"}, fates


def test_every_argument_of_openrlhf_is_answered(tmp_path: Path) -> None:
    tree = ast.parse(real(PACKAGES / "openrlhf/cli/train_ppo_ray.py").read_text())
    source = {
        name.removeprefix("--"): default
        for name, default in _arguments(tree)
        if default is not None
    }
    assert len(source) > 100
    file = tmp_path / "flags.json"
    file.write_text(json.dumps(source))
    migration = read(file)
    assert unanswered(migration) == []
    launched(tmp_path, migration)


def _arguments(tree: ast.Module) -> list[tuple[str, Any]]:
    """The flags of argparse with their defaults, both prefixes of those in a loop."""
    found: list[tuple[str, Any]] = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "parser.add_argument"):
            continue
        name = ast.unparse(node.args[0]).removeprefix("f").strip("'\"")
        given = [word.value for word in node.keywords if word.arg == "default"]
        try:
            default = ast.literal_eval(given[0]) if given else None
        except ValueError:
            default = None
        found += [(name.replace("{prefix}", prefix), default) for prefix in ("actor", "critic")]
    return found


def test_every_field_of_grpo_config_is_answered(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    tree = ast.parse(real(PACKAGES / "trl/trainer/grpo_config.py").read_text())
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
    assert unanswered(migration) == []
    launched(tmp_path, migration)


def test_a_file_away_from_its_package_names_what_is_wanted(tmp_path: Path) -> None:
    file = tmp_path / "ppo_trainer.yaml"
    file.write_text("defaults: [actor@actor_rollout_ref.actor: dp_actor, _self_]\n")
    with pytest.raises(ConfigError, match="_generated_ppo_trainer"):
        read_source(file)
