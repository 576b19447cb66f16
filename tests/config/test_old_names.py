"""Names of the previous release keep working, and runs that it started can still be read."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from async_rl.core.errors import ConfigError
from async_rl.launchers.commands.runs import config_of
from async_rl.launchers.configuration.compose import compose, recompose, to_yaml
from async_rl.launchers.configuration.old_names import table
from async_rl.launchers.configuration.schema import sections, settings

OLD_RUN = Path(__file__).parent / "config_of_0_1.yaml"
"""The config.yaml that the previous release wrote, with generation.timeout_s=90 and
supervisor.start_timeout_s=200.
"""


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    shutil.copy(OLD_RUN, tmp_path / "config.yaml")
    return tmp_path


def test_every_new_name_is_a_setting_and_no_old_name_is() -> None:
    names = table()
    by_value = [new for values in names.values.values() for news in values.values() for new in news]
    new_names = [*names.renamed.values(), *by_value]
    known = {*settings(), *sections()}
    assert [new for new in new_names if new not in known] == []
    assert [old for old in (*names.renamed, *names.values, *names.removed) if old in known] == []


def test_an_old_name_on_the_command_line_works_and_names_the_new_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        config = compose("grpo_code", ["generation.timeout_s=77"])
    assert config.timeouts.group_s == 77
    assert "generation.timeout_s is now called timeouts.group_s" in caplog.text


@pytest.mark.parametrize(
    ("conf", "old", "new"),
    [
        ("grpo_code", ["algorithm.clip_low=0.1"], ["algorithm.policy_loss.clip_low=0.1"]),
        (
            "grpo_code",
            ["algorithm.kl_coef=0.1", "algorithm.kl_target=3", "algorithm.kl_controller=adaptive"],
            [
                "algorithm.kl=loss",
                "algorithm.kl.coef=0.1",
                "algorithm.kl.controller=adaptive",
                "algorithm.kl.controller.target=3",
            ],
        ),
        ("ppo_code", ["algorithm.kl_coef=0"], ["algorithm.kl=none"]),
        ("ppo_code", ["algorithm.kl_placement=loss"], ["algorithm.kl=loss"]),
        (
            "ppo_code",
            ["learner.critic.backbone=shared", "learner.critic.optimizer.lr=3e-3"],
            [
                "algorithm.advantage.critic=shared",
                "algorithm.advantage.critic.optimizer.lr=3e-3",
            ],
        ),
        ("grpo_code", ["algorithm.mask_truncated=true"], ["algorithm.truncated=mask"]),
        ("grpo_code", ["algorithm.value_clip=0.2", "learner.critic.enabled=false"], []),
        (
            "grpo_code",
            ["algorithm.policy_loss=ppo_vanilla", "algorithm.behavior_correction=none"],
            ["algorithm.policy_loss=ppo_vanilla"],
        ),
        (
            "grpo_code",
            ["algorithm.aggregation=sequence_sum", "algorithm.aggregation_tokens=12"],
            ["algorithm.aggregation=sequence_sum", "algorithm.aggregation.tokens=12"],
        ),
    ],
)
def test_old_names_of_the_objective_mean_the_same(
    conf: str, old: list[str], new: list[str]
) -> None:
    assert compose(conf, old) == compose(conf, new)


def test_an_older_run_has_the_objective_that_its_flat_settings_described(old_run: Path) -> None:
    assert config_of(old_run).algorithm == compose("grpo_code").algorithm
    path = old_run / "config.yaml"
    text = path.read_text().replace("kl_coef: 0.0", "kl_coef: 0.3")
    path.write_text(text.replace("mask_truncated: false", "mask_truncated: true"))
    algorithm = config_of(old_run).algorithm
    assert (algorithm.kl.kind, algorithm.truncated) == ("loss", "mask")
    assert algorithm.reference is not None
    assert algorithm.reference.coef == 0.3


def test_an_old_name_in_a_users_file_works(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("defaults: [grpo_code, _self_]\nsupervisor:\n  stall_timeout_s: 900\n")
    assert compose(str(path)).timeouts.stall_s == 900


@pytest.mark.parametrize("section", ["weights:\n  deadline_s: 5\n", "generation:\n  top_p: 0.9\n"])
def test_a_removed_setting_in_a_users_file_is_refused_with_the_reason(
    tmp_path: Path, section: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"defaults: [grpo_code, _self_]\n{section}")
    with pytest.raises(ConfigError, match=r"timeouts.start_s / 3|full vocabulary"):
        compose(str(path))


def test_a_removed_setting_on_the_command_line_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"timeouts\.start_s / 3"):
        compose("grpo_code", ["weights.deadline_s=5"])


def test_the_configuration_of_an_older_run_is_read_with_its_values(old_run: Path) -> None:
    config = config_of(old_run)
    assert (config.timeouts.group_s, config.timeouts.start_s) == (90, 200)


def test_an_older_run_is_resumed_with_its_values_and_written_in_the_present_form(
    old_run: Path,
) -> None:
    config = recompose(old_run / "config.yaml", ["num_steps=61"])
    assert (config.timeouts.group_s, config.timeouts.start_s, config.num_steps) == (90, 200, 61)
    assert "timeouts:" in to_yaml(config)


def test_a_run_of_an_unknown_version_names_what_is_in_the_way(old_run: Path) -> None:
    path = old_run / "config.yaml"
    path.write_text(path.read_text() + "engine_of_the_future: 1\n")
    with pytest.raises(ConfigError, match=r"of another version.*engine_of_the_future"):
        config_of(old_run)


def test_an_older_run_whose_kl_this_release_lacks_can_be_read_and_is_not_resumed(
    old_run: Path,
) -> None:
    path = old_run / "config.yaml"
    text = path.read_text().replace("kl_coef: 0.0", "kl_coef: 0.1")
    path.write_text(text.replace("kl_placement: loss", "kl_placement: reward"))
    assert config_of(old_run).num_steps > 0
    with pytest.raises(ConfigError, match=r"kl_estimator=k3.*resume the run with the version"):
        recompose(path, [])
    path.write_text(path.read_text().replace("kl_estimator: k3", "kl_estimator: k1"))
    assert recompose(path, []).num_steps > 0
