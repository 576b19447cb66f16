"""`async-rl migrate` on the files of other trainers as their packages have them."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from migration_support import check_answers, check_launch

from async_rl.launchers.migration.applying import read

PACKAGES = Path(__file__).parents[2] / "build" / "adapters"
CONFIGURATIONS = PACKAGES / "verl" / "trainer" / "config"


def real(path: Path) -> Path:
    if not path.exists():
        pytest.skip(f"{path.name} belongs to a package that `make adapters` installs")
    return path


VERL_FILES = [
    CONFIGURATIONS / "_generated_ppo_trainer.yaml",
    CONFIGURATIONS / "ppo_trainer.yaml",
    PACKAGES / "verl/experimental/fully_async_policy/config/fully_async_ppo_trainer.yaml",
]


@pytest.mark.parametrize("file", VERL_FILES, ids=lambda file: file.stem)
def test_every_key_of_a_file_of_verl_is_answered(tmp_path: Path, file: Path) -> None:
    migration = read(real(file))
    check_answers(migration)
    assert len(migration.lines) > (70 if "async" in file.stem else 700), "hydra composes the parts"
    check_launch(tmp_path, migration)


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
    check_answers(migration)
    check_launch(tmp_path, migration)
