"""Copies of the checkpoints at an fsspec URL."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from async_rl.errors import InfrastructureError
from async_rl.processes.checkpoints import directory_of, versions
from async_rl.processes.mirror import Mirror


def make(run_dir: Path, version: int) -> None:
    directory = directory_of(run_dir, version)
    (directory / "inner").mkdir(parents=True)
    (directory / ".metadata").write_text(f"of {version}")
    (directory / "inner" / "0.distcp").write_bytes(bytes([version]) * 1000)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_copies_follow_the_local_folder_and_bring_it_back(tmp_path: Path, kind: str) -> None:
    url = "memory://mirror" if kind == "memory" else f"file://{tmp_path}/elsewhere"
    run_dir = tmp_path / f"run-{kind}"
    mirror = Mirror(url, run_dir)
    for version in (5, 10):
        make(run_dir, version)
        mirror.update()
    assert mirror.versions() == [5, 10]
    shutil.rmtree(directory_of(run_dir, 5))
    make(run_dir, 15)
    mirror.update()
    assert mirror.versions() == [10, 15]
    shutil.rmtree(run_dir / "checkpoints")
    Mirror(url, run_dir).fetch_newest()
    assert versions(run_dir) == [15]
    assert (directory_of(run_dir, 15) / "inner" / "0.distcp").read_bytes() == bytes([15]) * 1000
    assert (directory_of(run_dir, 15) / ".metadata").read_text() == "of 15"


def test_a_copy_that_was_not_finished_is_not_brought_back(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    make(run_dir, 5)
    mirror = Mirror(str(tmp_path / "elsewhere"), run_dir)
    mirror.update()
    (tmp_path / "elsewhere" / "run" / "step_000005.complete").unlink()
    shutil.rmtree(run_dir / "checkpoints")
    mirror.fetch_newest()
    assert versions(run_dir) == []


def test_what_is_there_locally_is_not_replaced(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    make(run_dir, 5)
    mirror = Mirror(str(tmp_path / "elsewhere"), run_dir)
    mirror.update()
    (directory_of(run_dir, 5) / ".metadata").write_text("mine")
    mirror.fetch_newest()
    assert (directory_of(run_dir, 5) / ".metadata").read_text() == "mine"


def test_a_place_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match=r"checkpoint\.mirror=nowhere://x cannot be used"):
        Mirror("nowhere://x", tmp_path)
    (tmp_path / "file").write_text("")
    make(tmp_path / "run", 5)
    with pytest.raises(InfrastructureError, match="cannot be written"):
        Mirror(str(tmp_path / "file"), tmp_path / "run").update()
