"""Which embedded model a run has, what model.path may be, and the cache of what is made."""

import fcntl
import json
import logging
import threading
from pathlib import Path

import msgspec
import pytest
from composing import compose_unchecked
from data_support import make_config

from async_rl.core.errors import ConfigError
from async_rl.data.cache import build_once
from async_rl.data.model_files import prepare_model


def silent(fraction: float, text: str) -> None:
    pass


def fake_model(directory: Path) -> Path:
    directory.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (directory / name).write_text("{}")
    return directory


def test_only_the_rollout_that_asks_again_gets_the_model_that_saw_second_turns() -> None:
    for names, model in (
        (("grpo_code", "ppo_code"), "tiny_coder"),
        (("grpo_code_retry", "agent_code"), "tiny_coder_retries"),
    ):
        assert {prepare_model(compose_unchecked(name), silent).name for name in names} == {model}


def test_an_interrupted_build_leaves_nothing_and_a_killed_one_is_removed(tmp_path: Path) -> None:
    def interrupt(built: Path) -> None:
        built.mkdir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / "model", interrupt)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.lock"]
    left = tmp_path / "model.abc123.build"
    left.mkdir()
    path = build_once(tmp_path / "model", lambda built: fake_model(built) and None)
    assert (path / "model.safetensors").is_file()
    assert not left.exists()


@pytest.mark.covers("train_files, val_files: the cache's lock")
def test_a_second_process_waits_for_the_first_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_waiting, built, path = threading.Event(), [], tmp_path / "model"
    log = logging.getLogger("async_rl.data.cache")
    monkeypatch.setattr(log, "info", lambda *_: is_waiting.set())
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=build_once, args=(path, built.append))
        second.start()
        assert is_waiting.wait(timeout=30)
        fake_model(path)
    second.join(timeout=30)
    assert not second.is_alive()
    assert built == [], "the second one made it again"


def test_a_cache_that_cannot_be_written_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match=r"cannot be kept in .*set XDG_CACHE_HOME to a writable"):
        prepare_model(make_config("model.override_config=['attention_dropout=0.1']"), silent)


@pytest.mark.covers("override_config")
def test_fields_of_the_models_configuration_are_overridden_in_a_directory_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = fake_model(tmp_path / "model")
    plain = {"model_type": "qwen3", "rope_theta": 10000.0, "hidden_size": 64}
    (directory / "config.json").write_text(json.dumps(plain))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def fields(*overrides: str) -> dict[str, object]:
        settings = ",".join(f"'{override}'" for override in overrides)
        path = prepare_model(
            make_config(f"model.path={directory}", f"model.override_config=[{settings}]"), silent
        )
        assert (path / "model.safetensors").read_text() == "{}"
        found: dict[str, object] = msgspec.json.decode((path / "config.json").read_bytes())
        return found

    assert fields() == plain
    changed = {"attention_dropout": 0.1, "rope_theta": 500000.0}
    assert fields("attention_dropout=0.1", "rope_theta=5e5") == plain | changed
    assert fields("attention_dropout=0.2") == plain | {"attention_dropout": 0.2}
    assert sum(path.is_dir() for path in (tmp_path / "cache" / "async_rl").iterdir()) == 2
    for field, reason in (
        ("hiden_size=3", "has no such field; it has .*hidden_size"),
        ("hidden_size=big", "not JSON .* quote text"),
    ):
        with pytest.raises(ConfigError, match=rf"model\.override_config={field}: .*{reason}"):
            fields(field)


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
