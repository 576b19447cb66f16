"""Facts about composing a run's configuration from files and overrides."""

from pathlib import Path

import msgspec
import pytest
from tables import table

from async_rl.composition.compose import (
    compose,
    compose_unchecked,
    recompose,
    to_yaml,
    write_config,
)
from async_rl.composition.files import USER_CONFIG, names
from async_rl.composition.problems import known_names
from async_rl.composition.schema import CONF_DIR, find, settings
from async_rl.config.policy_losses import CispoLoss
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.runs.status import config_of


def problem(*overrides: str, conf: str = "ppo_code") -> str:
    with pytest.raises(ConfigError) as caught:
        compose(conf, overrides)
    return str(caught.value)


@pytest.mark.covers("disable_value")
def test_every_name_in_conf_composes_and_the_algorithm_decides_about_a_critic() -> None:
    for conf in names():
        compose(conf)
    for algorithm in (CONF_DIR / "algorithm").glob("*.yaml"):
        compose(
            "ppo_code" if algorithm.stem == "ppo" else "grpo_code", [f"algorithm={algorithm.stem}"]
        )
    ppo, grpo = compose("ppo_code").algorithm, compose("grpo_code").algorithm
    assert (ppo.advantage.kind, ppo.critic is None, ppo.kl.kind) == ("gae", False, "reward")
    assert (grpo.advantage.kind, grpo.critic is None, grpo.kl.kind) == ("grpo", True, "none")
    assert compose("ppo_code", ["algorithm=grpo"]) == compose("grpo_code")


def test_the_configuration_is_the_same_after_a_trip_through_its_file(tmp_path: Path) -> None:
    for name in ("007", "1e3", "yes", "1-2"):
        config = compose("ppo_code", [f"run_name={name}", "learner.optimizer.eps=1e-8"])
        file = tmp_path / f"{name}.yaml"
        write_config(config, file)
        assert RunConfig.model_validate(msgspec.yaml.decode(file.read_bytes())) == config
        assert config.run_name == name
    assert list(msgspec.yaml.decode(to_yaml(config))) == list(RunConfig.model_fields)
    with pytest.raises(FileExistsError):
        write_config(config, tmp_path / "007.yaml")


def test_paths_become_absolute_and_hub_names_and_urls_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ada")
    files = ["data.train_files=[a b.jsonl,s3://b/c.parquet]", "data.val_files=~/v.jsonl"]
    config = compose("ppo_code", [*files, "model.path=owner/name", "output_dir=out"])
    assert config.data.train_files == [f"{tmp_path}/a b.jsonl", "s3://b/c.parquet"]
    # One file stands for a list of one.
    assert config.data.val_files == ["/home/ada/v.jsonl"]
    assert (config.output_dir, config.model.path) == (f"{tmp_path}/out", "owner/name")
    # Longer texts than those of the embedded task.
    assert (config.data.max_prompt_tokens, config.data.max_response_tokens) == (1024, 1024)
    embedded = compose("ppo_code").data
    assert (embedded.max_prompt_tokens, embedded.max_response_tokens) == (64, 64)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    short = compose("ppo_code", [*files, "model.path=owner/name", "data.max_prompt_tokens=256"])
    assert short.model.path == f"{tmp_path}/owner/name"
    assert short.data.max_prompt_tokens == 256


@pytest.mark.parametrize("name", ["wrong_keys", "wrong_values", "an_override_that_hydra_would"])
def test_a_wrong_override_is_told_with_its_path_and_what_is_right(name: str) -> None:
    rows = table(__file__, name)
    for override, expected in rows:
        assert expected in problem(override), override
    assert "did you mean ppo_code?" in problem(conf="ppo_cod")
    assert "No such file or directory" in problem(conf="/nowhere/mine.yaml")


def test_wrong_keys_and_wrong_values_are_reported_together() -> None:
    wrong = problem("num_step=3", "learner.ranks=two", "buffer.groups_per_step=0", "seed=5")
    paths = [line.partition("=")[0] for line in wrong.splitlines()]
    assert sorted(paths) == ["buffer.groups_per_step", "learner.ranks", "num_step"]


def test_a_setting_given_twice_is_refused_with_both_values() -> None:
    for first, second in table(__file__, "a_setting_given_twice_is"):
        assert problem(first, "seed=3", second) == (
            f"{second}: was already given as {first}; give each setting once"
        )


def test_a_users_file_builds_on_ours_and_may_bring_choices_and_overrides_win_over_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware" / "mine.yaml").write_text("# @package _global_\nverifiers: {cells: 9}\n")
    file = tmp_path / "mine.yaml"
    file.write_text(
        "defaults: [ppo_code, override algorithm: grpo]\nnum_steps: 7\nseed: 3\nlearner:"
        " {optimizer: {lr: 1e-3}}\n"
    )
    config = compose(str(file), ["seed=4"])
    assert (config.num_steps, config.seed, config.learner.optimizer.lr) == (7, 4, 1e-3)
    assert config.algorithm.advantage.kind == "grpo"
    assert config.verifiers.cells != 9
    # A choice stands for the whole group: what cpu.yaml would have set is missing then.
    assert "learner.gpus_each is missing" in problem("hardware=mine", conf=str(file))


@pytest.mark.parametrize(("text", "expected"), table(__file__, "wrong_files"))
def test_a_wrong_users_file_is_told_with_its_remedy(
    tmp_path: Path, text: str, expected: str
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    message = problem(conf=str(file))
    assert expected in message
    assert USER_CONFIG not in message


CLIP = "algorithm.policy_loss.clip_low"


def test_choosing_a_variant_takes_its_own_values_in_any_order() -> None:
    knobs = [f"{CLIP}=0.1", "algorithm.policy_loss=cispo"]
    for overrides in (knobs, knobs[::-1]):
        loss = compose("grpo_code", overrides).algorithm.policy_loss
        assert isinstance(loss, CispoLoss)
        assert (loss.clip_low, loss.clip_high, loss.correction.kind) == (0.1, 2.0, "token_tis")


def test_a_parameter_of_another_variant_is_refused_with_the_variant_that_has_it() -> None:
    for overrides, expected in table(__file__, "other_variants"):
        (line,) = problem(*overrides, conf="grpo_code").splitlines()
        assert expected in line, overrides


def test_problems_in_a_users_file_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "defaults: [ppo_code]\nbufer: {groups_per_step: 4}\nlearner: {ranks: two}\nseed: x\n"
    )
    lines = problem("seed=y", conf=str(file)).splitlines()
    assert [line.startswith(f"conf={file}: ") for line in lines] == [False, True, True]


@pytest.mark.covers("train_batch_size", "total_epochs")
def test_the_number_of_steps_follows_from_the_epochs_and_the_rows_of_all_files(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n" * 30)
    (tmp_path / "b.jsonl").write_text("{}\n\n" * 3)
    files = ["model.path=owner/name", "evaluation.every_steps=0"]
    files.append(f"data.train_files={tmp_path}/*.jsonl")

    def steps(epochs: float, *words: str) -> int:
        return compose("ppo_code", ["num_steps=null", f"data.epochs={epochs}", *words]).num_steps

    # 33 rows
    assert steps(1, *files, "buffer.groups_per_step=8") == 5
    assert steps(2.5, *files, "buffer.groups_per_step=16") == 6
    assert steps(1) == 855, "13,680 prompts of the embedded task"
    write_config(compose("ppo_code", ["num_steps=null", "data.epochs=1"]), tmp_path / "config.yaml")
    assert recompose(config_of(tmp_path), []).num_steps == 855, "in a resumed run"
    assert recompose(config_of(tmp_path), ["num_steps=7"]).num_steps == 7
    with pytest.raises(ConfigError, match="nothing says how long"):
        compose("ppo_code", ["num_steps=null"])
    with pytest.raises(ConfigError, match="no such file"):
        steps(1, *files[:2], "data.train_files=gone.jsonl")


def test_every_name_of_another_trainer_leads_to_a_setting_that_exists() -> None:
    assert [path for path in known_names().values() if find(path) is None] == []
    assert not known_names().keys() & set(settings())


def test_no_road_writes_a_configuration_with_a_contradiction(tmp_path: Path) -> None:
    bad = compose_unchecked("grpo_code", ["learner.minibatches=3"])
    for write in (to_yaml, lambda config: write_config(config, tmp_path / "config.yaml")):
        with pytest.raises(ConfigError, match=r"learner\.minibatches=3 with buffer\."):
            write(bad)
