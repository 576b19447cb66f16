"""Facts about composing a run's configuration from files and overrides."""

import logging
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tables import table

from async_rl.composition import schema
from async_rl.composition.choices import CONF_DIR, variants
from async_rl.composition.compose import (
    compose,
    compose_unchecked,
    recompose,
    to_yaml,
    write_config,
)
from async_rl.composition.files import USER_CONFIG, names
from async_rl.composition.overrides import with_defaults
from async_rl.composition.problems import known_names
from async_rl.composition.schema import (
    Setting,
    entry,
    entry_of,
    find,
    flatten,
    settings,
)
from async_rl.config.policy_losses import CispoLoss
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.runs.status import config_of

ROOT = Path(__file__).resolve().parents[2]


def problem(*overrides: str, conf: str = "ppo_code") -> str:
    with pytest.raises(ConfigError) as caught:
        compose(conf, overrides)
    return str(caught.value)


@pytest.mark.parametrize("conf", names())
def test_every_name_in_conf_composes_without_overrides(conf: str) -> None:
    assert isinstance(compose(conf), RunConfig)


@pytest.mark.covers("disable_value")
def test_ppo_has_a_critic_and_grpo_has_none() -> None:
    ppo, grpo = compose("ppo_code").algorithm, compose("grpo_code").algorithm
    assert (ppo.advantage.kind, ppo.critic is None, ppo.kl.kind) == ("gae", False, "reward")
    assert (grpo.advantage.kind, grpo.critic is None, grpo.kl.kind) == ("grpo", True, "none")


def test_the_configuration_is_the_same_after_a_trip_through_its_file(tmp_path: Path) -> None:
    for name in ("007", "1e3", "yes", "1-2"):
        config = compose("ppo_code", [f"run_name={name}", "learner.optimizer.eps=1e-8"])
        write_config(config, tmp_path / f"{name}.yaml")
        assert (
            RunConfig.model_validate(msgspec.yaml.decode((tmp_path / f"{name}.yaml").read_bytes()))
            == config
        )
        assert config.run_name == name


def test_the_configuration_is_written_once(tmp_path: Path) -> None:
    config = compose("ppo_code")
    write_config(config, tmp_path / "config.yaml")
    with pytest.raises(FileExistsError):
        write_config(config, tmp_path / "config.yaml")


def test_one_file_stands_for_a_list_of_one(tmp_path: Path) -> None:
    model = "model.path=owner/name"
    one = compose(
        "ppo_code", [model, f"data.train_files={tmp_path}/a b.jsonl", "evaluation.every_steps=0"]
    )
    many = compose(
        "ppo_code",
        [model, f'data.train_files=["{tmp_path}/a b.jsonl"]', "evaluation.every_steps=0"],
    )
    assert one.data.train_files == many.data.train_files == [f"{tmp_path}/a b.jsonl"]


def test_paths_become_absolute_and_hub_names_and_urls_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ada")
    files = ["data.train_files=[a.jsonl,s3://b/c.parquet]", "data.val_files=~/v.jsonl"]
    config = compose("ppo_code", [*files, "model.path=owner/name", "output_dir=out"])
    assert config.data.train_files == [f"{tmp_path}/a.jsonl", "s3://b/c.parquet"]
    assert config.data.val_files == ["/home/ada/v.jsonl"]
    assert (config.output_dir, config.model.path) == (f"{tmp_path}/out", "owner/name")
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert (
        compose("ppo_code", [*files, "model.path=owner/name"]).model.path
        == f"{tmp_path}/owner/name"
    )


@pytest.mark.parametrize(("override", "expected"), table(__file__, "wrong_keys"))
def test_a_wrong_key_is_told_with_the_nearest_right_one(override: str, expected: str) -> None:
    assert expected in problem(override)


@pytest.mark.parametrize(("override", "expected"), table(__file__, "wrong_values"))
def test_a_wrong_value_is_told_with_its_path_and_what_it_must_be(
    override: str, expected: str
) -> None:
    assert expected in problem(override)


@pytest.mark.parametrize(("override", "expected"), table(__file__, "an_override_that_hydra_would"))
def test_an_override_that_hydra_would_misread_is_refused(override: str, expected: str) -> None:
    assert expected in problem(override)


@pytest.mark.parametrize(("first", "second"), table(__file__, "a_setting_given_twice_is"))
def test_a_setting_given_twice_is_refused_with_both_values(first: str, second: str) -> None:
    assert problem(first, "seed=3", second) == (
        f"{second}: was already given as {first}; give each setting once"
    )


def test_defaults_stay_out_where_the_setting_is_given() -> None:
    given = ["algorithm.policy_loss.kind=cispo", "seed=3"]
    defaults = ["algorithm.policy_loss=gspo", "learner.ranks=2"]
    assert with_defaults(given, defaults) == ["learner.ranks=2", *given]


def test_an_unknown_name_is_told_with_the_nearest_one() -> None:
    assert "did you mean ppo_code?" in problem(conf="ppo_cod")
    assert "No such file or directory" in problem(conf="/nowhere/mine.yaml")


def test_a_users_file_builds_on_ours_and_overrides_win_over_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "defaults: [ppo_code, override algorithm: grpo]\nnum_steps: 7\nseed: 3\nlearner:"
        " {optimizer: {lr: 1e-3}}\n"
    )
    config = compose(str(file), ["seed=4"])
    assert (
        config.num_steps,
        config.seed,
        config.learner.optimizer.lr,
        config.algorithm.advantage.kind,
    ) == (7, 4, 1e-3, "grpo")


def test_a_users_file_may_bring_a_choice_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware" / "mine.yaml").write_text("# @package _global_\nverifiers: {cells: 9}\n")
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [ppo_code]\n")
    assert compose(str(file)).verifiers.cells != 9
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


def test_composition_leaves_logging_and_the_working_directory_alone() -> None:
    before = os.getcwd(), list(logging.getLogger().handlers), logging.getLogger().level
    compose("ppo_code")
    assert (os.getcwd(), list(logging.getLogger().handlers), logging.getLogger().level) == before


@pytest.mark.parametrize(
    ("cores", "generator", "learner"),
    [
        ({5}, [5], [5]),
        ({0, 1}, [0], [1]),
        ({2, 4, 6}, [2], [4, 6]),
        (set(range(8)), [0, 1, 2, 3], [4, 5, 6, 7]),
    ],
)
def test_cores_are_shared_between_generation_and_learning(
    monkeypatch: pytest.MonkeyPatch, cores: set[int], generator: list[int], learner: list[int]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    config = compose("ppo_code")
    assert (config.generators.cores, config.learner.cores) == (generator, learner)


def test_files_have_room_for_longer_texts_than_the_embedded_task() -> None:
    files = ["model.path=owner/name", "data.train_files=/d/a.jsonl", "evaluation.every_steps=0"]
    embedded, own = compose("ppo_code").data, compose("ppo_code", files).data
    assert (embedded.max_prompt_tokens, embedded.max_response_tokens) == (64, 64)
    assert (own.max_prompt_tokens, own.max_response_tokens) == (1024, 1024)
    assert compose("ppo_code", [*files, "data.max_prompt_tokens=256"]).data.max_prompt_tokens == 256


def test_every_setting_has_a_description_and_one_default() -> None:
    assert [path for path, setting in settings().items() if not setting.description] == []
    files = [
        CONF_DIR / name
        for name in (
            "base.yaml",
            "task/list_functions.yaml",
            "model/tiny_coder.yaml",
            "hardware/cpu.yaml",
        )
    ]
    seen: dict[str, list[str]] = {}
    for file in files:
        for path in _leaves(file):
            seen.setdefault(path, []).append(file.name)
    assert {path: where for path, where in seen.items() if len(where) != 1} == {}
    chosen = set(_leaves(CONF_DIR / "algorithm" / "ppo.yaml"))
    of_variants = {
        f"{place}.{name}"
        for place, by_kind in variants().items()
        for parameters in by_kind.values()
        for name, _ in flatten(parameters)
    }
    entries = set(entry("reward.terms", "*"))
    assert set(seen) | chosen | of_variants == set(settings()) | (entries - {"reward.terms.*"})


def test_every_variant_has_a_value_for_each_of_its_parameters() -> None:
    for place, by_kind in variants().items():
        known = settings() | entry_of(place)
        owners = {
            kind: {name for name in section["properties"] if f"{place}.{name}" in known}
            for section in schema.members_of(find_choice(place).spec)
            for kind in schema.kinds_of(section)
        }
        # A section inside a variant has its values as a mapping.
        given = {
            kind: {name for name, value in parameters.items() if not isinstance(value, dict)}
            for kind, parameters in by_kind.items()
        }
        assert given == owners, place


def find_choice(path: str) -> Setting:
    setting = find(path)
    assert setting is not None
    assert setting.choices
    return setting


CLIP = "algorithm.policy_loss.clip_low"


def test_choosing_a_variant_takes_its_own_values_in_any_order() -> None:
    knobs = [f"{CLIP}=0.1", "algorithm.policy_loss=cispo"]
    for overrides in (knobs, knobs[::-1]):
        loss = compose("grpo_code", overrides).algorithm.policy_loss
        assert isinstance(loss, CispoLoss)
        assert (loss.clip_low, loss.clip_high, loss.correction.kind) == (0.1, 2.0, "token_tis")


@pytest.mark.parametrize(("overrides", "expected"), table(__file__, "other_variants"))
def test_a_parameter_of_another_variant_is_refused_with_the_variant_that_has_it(
    overrides: list[str], expected: str
) -> None:
    message = problem(*overrides, conf="grpo_code")
    assert expected in message
    assert len(message.splitlines()) == 1


def test_problems_in_a_users_file_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "defaults: [ppo_code]\nbufer: {groups_per_step: 4}\nlearner: {ranks: two}\nseed: x\n"
    )
    lines = problem("seed=y", conf=str(file)).splitlines()
    assert [line.startswith(f"conf={file}: ") for line in lines] == [False, True, True]


@pytest.mark.parametrize(
    "file", sorted((CONF_DIR / "algorithm").glob("*.yaml")), ids=lambda file: file.stem
)
def test_an_algorithm_says_only_what_differs_from_the_base(file: Path) -> None:
    defaults = _leaves(CONF_DIR / "base.yaml")
    assert {
        path: value
        for path, value in _leaves(file).items()
        if path in defaults and defaults[path] == value
    } == {}
    assert compose(
        "grpo_code" if file.stem != "ppo" else "ppo_code", [f"algorithm={file.stem}"]
    ).algorithm.advantage


def _leaves(file: Path) -> dict[str, Any]:
    package = next(
        (
            line.split()[-1]
            for line in file.read_text().splitlines()
            if line.startswith("# @package")
        ),
        "",
    )
    folder = "" if file.parent == CONF_DIR else file.parent.name
    prefix = {"_global_": "", "": f"{folder}." if folder else ""}.get(package, f"{package}.")
    tree = msgspec.yaml.decode(file.read_bytes())
    tree.pop("defaults", None)
    return dict(flatten(tree, prefix))


def test_the_yaml_is_in_the_order_of_the_schema() -> None:
    assert list(msgspec.yaml.decode(to_yaml(compose("ppo_code")))) == list(RunConfig.model_fields)


@pytest.mark.covers("train_batch_size", "total_epochs")
def test_the_number_of_steps_follows_from_the_epochs_and_the_rows_of_all_files(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n" * 30)
    (tmp_path / "b.jsonl").write_text("{}\n\n" * 3)
    given = [
        "num_steps=null",
        "model.path=owner/name",
        "evaluation.every_steps=0",
        f"data.train_files={tmp_path}/*.jsonl",
    ]
    steps = {
        (epochs, groups): (
            compose(
                "ppo_code", [*given, f"data.epochs={epochs}", f"buffer.groups_per_step={groups}"]
            ).num_steps
        )
        for epochs in (1, 2.5)
        for groups in (8, 16)
    }
    assert steps == {(1, 8): 5, (1, 16): 3, (2.5, 8): 11, (2.5, 16): 6}  # 33 rows
    assert (
        compose("ppo_code", ["num_steps=null", "data.epochs=1"]).num_steps == 855
    )  # 13,680 prompts of the embedded task
    with pytest.raises(ConfigError, match="nothing says how long"):
        compose("ppo_code", ["num_steps=null"])
    with pytest.raises(ConfigError, match="no such file"):
        compose(
            "ppo_code",
            [
                "num_steps=null",
                "data.epochs=1",
                "model.path=m",
                "data.train_files=gone.jsonl",
                "evaluation.every_steps=0",
            ],
        )


def test_a_resumed_run_keeps_the_number_of_steps_that_was_counted(tmp_path: Path) -> None:
    config = compose("ppo_code", ["num_steps=null", "data.epochs=1"])
    write_config(config, tmp_path / "config.yaml")
    assert recompose(config_of(tmp_path), []).num_steps == 855
    assert recompose(config_of(tmp_path), ["num_steps=7"]).num_steps == 7


def test_wrong_keys_and_wrong_values_are_reported_together() -> None:
    wrong = problem("num_step=3", "learner.ranks=two", "buffer.groups_per_step=0", "seed=5")
    paths = [line.partition("=")[0] for line in wrong.splitlines()]
    assert sorted(paths) == ["buffer.groups_per_step", "learner.ranks", "num_step"]


def test_every_name_of_another_trainer_leads_to_a_setting_that_exists() -> None:
    missing = [name for name, path in known_names().items() if schema.find(path) is None]
    assert missing == []
    assert not known_names().keys() & set(schema.settings())


def test_no_road_writes_a_configuration_with_a_contradiction(tmp_path: Path) -> None:
    bad = compose_unchecked("grpo_code", ["learner.minibatches=3"])
    for write in (to_yaml, lambda config: write_config(config, tmp_path / "config.yaml")):
        with pytest.raises(ConfigError, match=r"learner\.minibatches=3 with buffer\."):
            write(bad)


def test_only_one_function_makes_the_text_that_processes_read() -> None:
    makers = [
        path.name
        for folder in ("async_rl", "launchers")
        for path in (ROOT / folder).rglob("*.py")
        if "yaml.encode(as_builtins(" in path.read_text()
    ]
    assert makers == ["compose.py"]


def test_choosing_the_algorithm_group_turns_one_name_into_the_other() -> None:
    assert compose("ppo_code", ["algorithm=grpo"]) == compose("grpo_code")
