from __future__ import annotations

import sys
from pathlib import Path

import pytest

from async_rl.core import extras
from async_rl.core.errors import ConfigError
from benchmarks.gguf_model import convert, main


def test_a_file_that_does_not_exist_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.gguf_model.missing", lambda *_: None)
    with pytest.raises(ConfigError, match=r"none\.gguf does not exist; name a GGUF file"):
        convert(tmp_path / "none.gguf", tmp_path / "model")


def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["gguf", "model.gguf", str(tmp_path / "model")])
    assert main() == 1
    assert "needs the package gguf, which is not installed; pip install 'async-rl[real]'" in (
        capsys.readouterr().err
    )


def test_a_file_that_is_no_gguf_leaves_nothing_behind(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed (make real)")
    (tmp_path / "bad.gguf").write_bytes(b"no model")
    with pytest.raises(ConfigError, match=r"bad\.gguf cannot be converted"):
        convert(tmp_path / "bad.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()
