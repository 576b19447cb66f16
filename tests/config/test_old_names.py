"""Names of the previous release keep working, and runs that it started can still be read."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from async_rl.composition.compose import compose, recompose, to_yaml
from async_rl.composition.old_names import table
from async_rl.composition.schema import sections, settings
from async_rl.core.errors import ConfigError
from async_rl.runs.config import config_of

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
    by_value = [new.removesuffix("?") for new in by_value]
    new_names = [*names.renamed.values(), *by_value]
    known = {*settings(), *sections()}
    assert [new for new in new_names if new not in known] == []
    old_names = (*names.renamed, *names.values, *names.removed, *names.refused)
    assert [old for old in old_names if old in known] == []


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
                "algorithm.advantage.critic.lr=3e-3",
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


def written(tmp_path: Path, text: str, conf: str = "grpo_code") -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(f"defaults: [{conf}, _self_]\n{text}")
    return str(path)


def test_a_removed_setting_is_left_out_and_says_what_decides_now(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        of_file = compose(written(tmp_path, "weights:\n  deadline_s: 5\n"))
    assert caplog.messages == [
        "weights.deadline_s is no longer a setting and is left out: it is timeouts.start_s / 3"
    ]
    assert of_file == compose("grpo_code", ["weights.deadline_s=5"]) == compose("grpo_code")


def test_a_removed_setting_that_changed_results_is_refused_unless_it_had_no_effect(
    tmp_path: Path,
) -> None:
    own = written(tmp_path, "generation:\n  top_p: 0.9\n")
    for conf, overrides in ((own, []), ("grpo_code", ["generation.top_p=0.9"])):
        with pytest.raises(ConfigError, match=r"generation.top_p=0.9.*full vocabulary"):
            compose(conf, overrides)
    assert compose("grpo_code", ["generation.top_p=1.0"]) == compose("grpo_code")


def test_an_old_kl_placement_without_a_coefficient_does_not_turn_a_kl_on(tmp_path: Path) -> None:
    text = "algorithm:\n  kl_placement: reward\n"
    with pytest.raises(ConfigError, match=r"kl_placement=reward: had no effect without .*kl_coef"):
        compose(written(tmp_path, text))
    with pytest.raises(ConfigError, match=r"kl_placement=reward: had no effect"):
        compose("grpo_code", ["algorithm.kl_placement=reward"])
    assert compose(written(tmp_path, f"{text}  kl_coef: 0.0\n")).algorithm.kl.kind == "none"
    assert compose(written(tmp_path, f"{text}  kl_coef: 0.1\n")).algorithm.kl.kind == "reward"
    assert compose(written(tmp_path, text, "ppo_code")) == compose("ppo_code")


def test_the_old_sections_of_clusters_belong_to_the_launcher_that_is_chosen(
    tmp_path: Path,
) -> None:
    own = written(
        tmp_path,
        "cluster: {nodes: 3, gpus_per_node: 8, verifier_cpus: 4}\nray: {address: 'head:6379'}\n"
        "slurm: {partition: big}\n",
    )
    size = ["launcher.nodes=3", "launcher.gpus_per_node=8"]
    for new in (
        ["launcher=slurm", "launcher.partition=big", *size],
        ["launcher=ray", "launcher.address=head:6379", *size],
        ["launcher=local"],
    ):
        assert compose(own, new[:1]) == compose("grpo_code", new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["reward.fn=a.b:f"], ["reward.terms.f=a.b:f"]),
        (
            ["reward.fns=[tests,length]", "reward.weights=[1,-0.5]"],
            [
                "reward.terms.tests=tests",
                "reward.terms.length=length",
                "reward.terms.length.weight=-0.5",
            ],
        ),
        (
            ["reward.by_source=['x=a.b:f','y=a.b:f']", "reward.fn=c:g"],
            ["reward.terms.f=a.b:f", "reward.terms.f.sources=[x,y]", "reward.terms.g=c:g"],
        ),
        (
            ["reward.fn=reward_model", "reward.model.path=/rm", "reward.model.clip=2.0"],
            [
                "reward.terms.reward_model=reward_model",
                "reward.terms.reward_model.path=/rm",
                "reward.terms.reward_model.clip=2.0",
            ],
        ),
        (
            ["reward.fn=remote", "reward.remote.url=http://h"],
            ["reward.terms.remote=remote", "reward.terms.remote.url=http://h"],
        ),
        (["reward.model.clip=2.0"], []),
    ],
)
def test_old_reward_functions_are_terms_of_the_reward(
    tmp_path: Path, old: list[str], new: list[str]
) -> None:
    assert compose("grpo_code", old).reward == compose("grpo_code", new).reward


def test_the_terms_of_an_older_run_are_read(old_run: Path) -> None:
    path = old_run / "config.yaml"
    assert config_of(old_run).reward.terms == {}
    path.write_text(path.read_text().replace("  fn: null\n  fns: []", "  fn: a.b:f\n  fns: []"))
    assert config_of(old_run).reward == compose("grpo_code", ["reward.terms.f=a.b:f"]).reward


def test_a_choice_that_is_made_again_keeps_what_the_file_says_of_it(tmp_path: Path) -> None:
    own = written(tmp_path, "launcher: {kind: slurm, nodes: 3}\n")
    for overrides in ([], ["launcher=slurm"]):
        assert compose(own, overrides) == compose(
            "grpo_code", ["launcher=slurm", "launcher.nodes=3"]
        )


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


@pytest.fixture
def run_with_two_optimizers(tmp_path: Path) -> dict[str, Any]:
    """The configuration of a run of the time when a critic had an AdamW of its own."""
    tree = msgspec.yaml.decode(to_yaml(compose("ppo_code")).encode(), type=dict)
    critic, policy = tree["algorithm"]["advantage"]["critic"], tree["learner"]["optimizer"]
    own = {name: value for name, value in policy.items() if name != "schedule_span"}
    critic["optimizer"] = own | {name: critic.pop(name) for name in ("lr", "schedule")}
    return tree


def test_a_run_whose_critic_had_another_optimizer_than_now_is_not_continued_silently(
    tmp_path: Path, run_with_two_optimizers: dict[str, Any]
) -> None:
    path, tree = tmp_path / "config.yaml", run_with_two_optimizers
    path.write_bytes(msgspec.yaml.encode(tree))
    assert recompose(path, []) == compose("ppo_code")
    tree["learner"]["optimizer"]["warmup_steps"] = 20
    path.write_bytes(msgspec.yaml.encode(tree))
    assert config_of(tmp_path).learner.optimizer.warmup_steps == 20
    with pytest.raises(
        ConfigError,
        match=r"critic.optimizer.warmup_steps=5: is 20 now, because the critic .* delete the line",
    ):
        recompose(path, [])
    del tree["algorithm"]["advantage"]["critic"]["optimizer"]["warmup_steps"]
    path.write_bytes(msgspec.yaml.encode(tree))
    assert recompose(path, []).learner.optimizer.warmup_steps == 20


def test_the_unused_critic_of_an_older_run_does_not_hinder_its_resume(old_run: Path) -> None:
    path = old_run / "config.yaml"
    path.write_text(path.read_text().replace("warmup_steps: 5", "warmup_steps: 20", 1))
    assert recompose(path, []).algorithm.critic is None


def test_an_older_run_that_sampled_a_part_of_the_vocabulary_is_not_continued_with_all(
    old_run: Path,
) -> None:
    path = old_run / "config.yaml"
    text = path.read_text()
    assert "top_p: 1.0" in text
    path.write_text(text.replace("top_p: 1.0", "top_p: 0.9"))
    with pytest.raises(ConfigError, match=r"generation.top_p=0.9: .*full vocabulary"):
        recompose(path, [])
