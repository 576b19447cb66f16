"""The cache of the embedded model, and what model.path may be."""

from __future__ import annotations

import dataclasses
import fcntl
import re
import threading
from pathlib import Path

import msgspec
import pytest
from composing import compose_unchecked
from data_support import SMALL_MODEL, make_config

from async_rl.config.base import replace
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.data import prepare
from async_rl.data.embedded import TINY_CODER, tiny_coder_of
from async_rl.data.prepare import cached_model_path, prepare_model


def silent(fraction: float, text: str) -> None:
    pass


def fake_model(directory: Path) -> Path:
    directory.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (directory / name).write_text("{}")
    return directory


def test_the_embedded_model_is_built_once_and_found_the_second_time(
    small_config: RunConfig,
) -> None:
    shown: list[tuple[float, str]] = []

    def prepared() -> Path:
        return prepare_model(small_config, lambda *news: shown.append(news), embedded=SMALL_MODEL)

    path = prepared()
    assert path == cached_model_path(small_config, SMALL_MODEL)
    assert (shown[0][0], shown[-1][0]) == (0, 1)
    assert any("warm start" in text for _, text in shown)
    shown.clear()
    assert prepared() == path
    assert shown == []
    assert sorted(entry.name for entry in path.parent.iterdir()) == [path.name, f"{path.name}.lock"]


def test_every_setting_of_the_model_has_its_own_cache_entry(small_config: RunConfig) -> None:
    defaults = dataclasses.asdict(SMALL_MODEL)
    # Another value of each field; the values are not used.
    variants = [{}, *({name: value + 0.25} for name, value in defaults.items())]
    paths = {
        cached_model_path(small_config, dataclasses.replace(SMALL_MODEL, **changed))
        for changed in variants
    }
    # The seed of the run is no part of the model.
    paths.add(cached_model_path(replace(small_config, seed=99), SMALL_MODEL))
    assert len(paths) == 11


def test_a_change_of_any_module_of_the_recipe_changes_the_key() -> None:
    maker = Path(prepare.__file__).with_name("tiny_coder.py").read_text()
    imports = re.findall(r"^from async_rl\.data(?:\.(\w+))? import (.+)$", maker, re.MULTILINE)
    modules = {name for module, names in imports for name in (module or names).split(", ")}
    assert {"tiny_coder.py", *(f"{name}.py" for name in modules)} < set(prepare.RECIPE)


def test_only_the_rollout_that_asks_again_gets_the_model_that_saw_second_turns() -> None:
    assert tiny_coder_of(compose_unchecked("grpo_code")) == TINY_CODER
    assert tiny_coder_of(compose_unchecked("grpo_code_retry")).retry_share == 0.5


@pytest.mark.parametrize("given", ["", "relative", "/other"])
def test_models_are_kept_in_the_users_cache_directory(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    root = given if given == "/other" else "/home/someone/.cache"
    assert cached_model_path(make_config()).parent == Path(root) / "async_rl"


def test_an_interrupted_build_leaves_nothing_behind(small_config: RunConfig) -> None:
    def interrupt(fraction: float, text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_model(small_config, interrupt, embedded=SMALL_MODEL)
    root = cached_model_path(small_config, SMALL_MODEL).parent
    assert [entry.suffix for entry in root.iterdir()] == [".lock"]


def test_what_a_killed_build_left_is_removed_and_the_model_built(small_config: RunConfig) -> None:
    path = cached_model_path(small_config, SMALL_MODEL)
    left = path.with_name(f"{path.name}.abc123.build")
    left.mkdir(parents=True)
    assert prepare_model(small_config, silent, embedded=SMALL_MODEL) == path
    assert (path / "model.safetensors").is_file()
    assert not left.exists()


def test_a_second_run_waits_for_the_first_and_says_so(small_config: RunConfig) -> None:
    path = cached_model_path(small_config, SMALL_MODEL)
    path.parent.mkdir(parents=True)
    told: list[str] = []
    is_waiting = threading.Event()

    def hear(fraction: float, text: str) -> None:
        told.append(text)
        is_waiting.set()

    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(
            target=prepare_model, args=(small_config, hear), kwargs={"embedded": SMALL_MODEL}
        )
        second.start()
        assert is_waiting.wait(timeout=30)
        fake_model(path)
    second.join(timeout=30)
    assert not second.is_alive()
    assert len(told) == 1
    assert told[0].startswith("waiting for another process")


def test_a_cache_that_cannot_be_written_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match=r"cannot be kept in .*set XDG_CACHE_HOME to a writable"):
        prepare_model(make_config(), silent)


@pytest.mark.covers("override_config")
def test_fields_of_the_models_configuration_are_overridden_in_a_directory_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = fake_model(tmp_path / "model")
    (directory / "config.json").write_text(
        '{"model_type": "qwen3", "rope_theta": 10000.0, "hidden_size": 64}'
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def fields(*overrides: str) -> dict[str, object]:
        settings = ",".join(f"'{override}'" for override in overrides)
        path = prepare_model(
            make_config(f"model.path={directory}", f"model.override_config=[{settings}]"), silent
        )
        assert (path / "model.safetensors").read_text() == "{}"
        found: dict[str, object] = msgspec.json.decode((path / "config.json").read_bytes())
        return found

    plain = {"model_type": "qwen3", "rope_theta": 10000.0, "hidden_size": 64}
    assert fields() == plain
    assert fields("attention_dropout=0.1", "rope_theta=5e5") == plain | {
        "attention_dropout": 0.1,
        "rope_theta": 500000.0,
    }
    assert fields("attention_dropout=0.2") == plain | {"attention_dropout": 0.2}
    assert sum(path.is_dir() for path in (tmp_path / "cache" / "async_rl").iterdir()) == 2
    with pytest.raises(
        ConfigError,
        match=r"model\.override_config=hiden_size=3: .* has no such field; it has .*hidden_size",
    ):
        fields("hiden_size=3")
    with pytest.raises(
        ConfigError, match=r"model\.override_config=hidden_size=big: not JSON .* quote text"
    ):
        fields("hidden_size=big")


@pytest.mark.parametrize(
    ("absent", "named"),
    [
        ("config.json", "config.json"),
        ("tokenizer.json", "tokenizer"),
        ("model.safetensors", "safetensors"),
    ],
)
def test_a_model_directory_that_lacks_a_part_is_refused_by_name(
    tmp_path: Path, absent: str, named: str
) -> None:
    directory = fake_model(tmp_path / "model")
    (directory / absent).unlink()
    with pytest.raises(
        ConfigError, match=rf"model.path={directory} lacks .*{named}.*save_pretrained"
    ):
        prepare_model(make_config(f"model.path={directory}"), silent)


def test_a_missing_directory_and_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such directory"):
        prepare_model(make_config(f"model.path={tmp_path / 'nowhere'}"), silent)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="there is no such directory"):
        prepare_model(make_config(f"model.path={tmp_path / 'file'}"), silent)


def hub_entry(root: Path, name: str) -> Path:
    """A snapshot laid out as the hub's client keeps it."""
    entry = root / f"models--{name.replace('/', '--')}"
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "main").write_text("0" * 40)
    return fake_model(entry / "snapshots" / ("0" * 40))


def test_a_hub_name_is_found_in_the_local_hub_cache_or_refused_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    # As the hub's client lays out a snapshot.
    entry = tmp_path / "models--someone--small"
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "main").write_text("0" * 40)
    snapshot = fake_model(entry / "snapshots" / ("0" * 40))
    assert prepare_model(make_config("model.path=someone/small"), silent) == snapshot.resolve()
    absent = r"model.path=someone/other is not a directory, not in the local hub cache, and cannot"
    with pytest.raises(ConfigError, match=absent):
        prepare_model(make_config("model.path=someone/other"), silent)
