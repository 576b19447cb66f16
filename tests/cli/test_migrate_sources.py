"""What people write: shell scripts, Python scripts, yaml in parts. Each is read as its own program
would read it, in the jail; what cannot be read is a line of the report.
"""

from pathlib import Path

import pytest
from composing import compose
from tables import table
from typer.testing import CliRunner

from async_rl.core.errors import ConfigError
from async_rl.launchers.cli import application
from async_rl.launchers.commands.migrate import to_yaml
from async_rl.launchers.migration import sources
from async_rl.launchers.migration.applying import Migration, read

MAIN = "python3 -m verl.trainer.main_ppo data.train_files=a.parquet data.val_files=b.parquet"
MODEL = "actor_rollout_ref.model.path=org/model"


def script(tmp_path: Path, text: str, name: str = "run.sh") -> Path:
    file = tmp_path / name
    file.write_text(text)
    return file


def reasons(migration: Migration) -> dict[str, str]:
    return {line.key: line.fate.reason for line in migration.lines if line.fate.kind == "refused"}


SHELL = table(__file__, "shell")


def test_a_shell_script_has_the_values_that_bash_gives_it(tmp_path: Path) -> None:
    settings = read(script(tmp_path, SHELL), ["actor_rollout_ref.rollout.n=4"]).settings
    expected = table(__file__, "of_shell")
    assert {path: settings[path] for path in expected} == expected


def test_a_script_cannot_reach_the_files_of_the_person(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("7")
    text = f"{MAIN} {MODEL} trainer.experiment_name=x$(cat {secret})\necho 8 > {secret}\n"
    assert read(script(tmp_path, text)).settings["run_name"] == "x"
    assert secret.read_text() == "7"
    text = f"open({str(secret)!r}).read()"
    with pytest.raises(ConfigError, match="No such file"):
        read(script(tmp_path, text, "train.py"))


def test_a_script_that_starts_no_trainer_or_has_no_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "CPU_S", 0.3)
    for name, text, match in (
        ("run.sh", "echo done\n", "starts no trainer"),
        ("run.sh", "ray start --head\n", "of no system"),
        ("a.py", "while True: 1\n", "was ended after"),
    ):
        with pytest.raises(ConfigError, match=match):
            read(script(tmp_path, text, name))


def test_only_small_scripts_are_read_beside_a_script(tmp_path: Path) -> None:
    with (tmp_path / "checkpoint").open("wb") as large:
        large.truncate(1 << 40)
    (tmp_path / "large.sh").write_bytes(b"#" * (1 << 21))
    (tmp_path / "more.sh").write_text("N=5\n")
    start = f"{MAIN} {MODEL} data.train_batch_size=${{N}}12"
    text = f"source ./more.sh\ncat checkpoint large.sh\n{start}\n"
    assert read(script(tmp_path, text, "run")).settings["buffer.groups_per_step"] == 512
    with pytest.raises(ConfigError, match="no script has more than 1 MB"):
        read(tmp_path / "large.sh")


def test_the_file_that_a_command_names_is_below_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    own = "data: {train_batch_size: 512, seed: '${oc.env:NOWHERE}'}\n"
    script(tmp_path / "config", own, "mine.yaml")
    text = f"{MAIN} {MODEL} --config-path=config --config-name=mine data.max_prompt_length=99"
    found = read(script(tmp_path, text))
    assert found.settings["buffer.groups_per_step"] == 512
    assert found.settings["data.max_prompt_tokens"] == 99
    absent = read(script(tmp_path, text.replace("mine", "other")))
    assert "not here" in reasons(absent)["config-name"]
    assert absent.settings["buffer.groups_per_step"] == 1024


PYTHON = table(__file__, "python")


def test_a_python_script_has_the_values_that_its_trainer_gets(tmp_path: Path) -> None:
    script(tmp_path, "def rate():\n    return 1e-6\n", "helpers.py")
    found = read(script(tmp_path, PYTHON, "train.py"))
    expected = table(__file__, "of_python")
    assert {path: found.settings[path] for path in expected} == expected
    assert "load_dataset('org/rows'" in reasons(found)["train_dataset"]
    assert "is_bf16_supported" in reasons(found)["bf16"]
    assert "0.26" in found.system, "max_prompt_length is a key of these releases"


def test_a_parser_gives_the_defaults_of_its_classes(tmp_path: Path) -> None:
    text = table(__file__, "parser")
    found = read(script(tmp_path, text, "train.py"), ["beta=0.1", "num_processes=4"])
    assert found.settings["algorithm.kl.coef"] == 0.1
    assert found.settings["buffer.groups_per_step"] == 4
    assert "model" in reasons(found)
    assert any("reward_funcs" in key for key in reasons(found))
    with pytest.raises(ConfigError, match=r"--release 7\.0: .*1\.16"):
        read(tmp_path / "train.py", release="7.0")


def test_what_a_script_decides_by_unknown_values_is_reported(tmp_path: Path) -> None:
    text = PYTHON.replace("config.beta = 0.0", "if torch.cuda.is_available(): config.beta = 1.0")
    script(tmp_path, "def rate():\n    return 1e-6\n", "helpers.py")
    found = read(script(tmp_path, text, "train.py"))
    assert any("is_available()" in key for key in reasons(found))
    ended = read(script(tmp_path, PYTHON + "\nraise SystemExit('no GPU')\n", "train.py"))
    assert any("no GPU" in key for key in reasons(ended))


def test_a_part_of_a_yaml_that_is_not_there_is_a_line_of_the_report(tmp_path: Path) -> None:
    text = "defaults: [ppo_trainer, dapo, _self_]\nactor_rollout_ref: {rollout: {n: 3}}\n"
    found = read(script(tmp_path, text, "mine.yaml"))
    assert found.settings["generation.group_size"] == 3
    assert [key for key in reasons(found) if key.startswith("defaults")] == ["defaults.dapo"]
    script(tmp_path, "data: {train_batch_size: 32}\n", "base.yaml")
    text = text.replace("ppo_trainer, dapo", "base")
    assert read(script(tmp_path, text, "mine.yaml")).settings["buffer.groups_per_step"] == 32


@pytest.mark.parametrize(("key", "value"), table(__file__, "a_value_that_has_no"))
def test_a_value_that_has_no_counterpart_leaves_a_valid_file(
    tmp_path: Path, key: str, value: str
) -> None:
    text = "actor_rollout_ref: {model: {path: m}}\ndata: {train_files: [a.jsonl]}\n"
    found = read(script(tmp_path, text, "x.yaml"), [f"{key}={value}"])
    assert key in reasons(found)
    target = script(tmp_path, to_yaml(found), "ours.yaml")
    given = ["data.val_files=[b.jsonl]"] if key in ("data.val_files", "trainer.test_freq") else []
    compose(str(target), ["num_steps=1", *given])


def test_data_that_are_not_there_are_never_the_embedded_task(tmp_path: Path) -> None:
    text = f"{MAIN.partition(' data')[0]} actor_rollout_ref.rollout.n=2 trainer.test_freq=5"
    file = script(tmp_path, text)
    ours, named = str(tmp_path / "ours.yaml"), str(tmp_path / "named.yaml")
    CliRunner().invoke(application(), ["migrate", str(file), "--output", ours])
    given = ["model.path=m", "num_steps=1"]
    with pytest.raises(ConfigError, match=r"data\.train_files=\?\?\?.*--data FILE"):
        compose(ours, given)
    files = ["data.train_files=[a.jsonl]", "data.val_files=[b.jsonl]"]
    assert compose(ours, [*given, *files]).data.train_files
    rows = ["--data", "a.jsonl", "--held-out", "b.jsonl", "--output", named]
    CliRunner().invoke(application(), ["migrate", str(file), *rows])
    assert [Path(path).name for path in compose(named, given).data.train_files] == ["a.jsonl"]
    with pytest.raises(ConfigError, match="async-rl migrate"):
        compose(str(script(tmp_path, "data: {seed: 1}\n", "ppo_trainer.yaml")), [])
