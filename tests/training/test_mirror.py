"""Copies of the checkpoints at an fsspec URL."""

import contextlib
import shutil
import sqlite3
from pathlib import Path

import fsspec
import pytest

from async_rl.buffer.store.connection import STORE_FILE
from async_rl.core.checksums import sums_of, write_sums
from async_rl.core.errors import ConfigError, InfrastructureError
from async_rl.training.checkpoints import directory_of, versions
from async_rl.training.mirror import Mirror


def make(run_dir: Path, version: int, *, recorded: int | None = None) -> None:
    """A checkpoint, and the records that the run has beside it, of so many steps."""
    directory = directory_of(run_dir, version)
    (directory / "inner").mkdir(parents=True)
    (directory / "index.json").write_text(f"of {version}")
    (directory / "inner" / "rank_0000.safetensors").write_bytes(bytes([version]) * 1000)
    write_sums(directory, sums_of(directory))
    record(run_dir, version if recorded is None else recorded)


def record(run_dir: Path, version: int) -> None:
    """The ledger and the records after so many steps."""
    with contextlib.closing(sqlite3.connect(run_dir / STORE_FILE)) as store:
        store.execute("PRAGMA journal_mode=WAL")
        store.execute("CREATE TABLE IF NOT EXISTS steps (version INTEGER)")
        store.execute("INSERT INTO steps VALUES (?)", (version,))
        store.commit()
    (run_dir / "config.yaml").write_text("name: mine\n")
    (run_dir / "metrics.jsonl").write_text(f"to {version}\n")


def steps(run_dir: Path) -> list[int]:
    with contextlib.closing(sqlite3.connect(run_dir / STORE_FILE)) as store:
        return [version for (version,) in store.execute("SELECT version FROM steps")]


@pytest.mark.covers("default_hdfs_dir")
def test_copies_follow_the_run_and_bring_the_newest_of_it_back(tmp_path: Path) -> None:
    url, run_dir = "memory://mirror", tmp_path / "run"
    mirror = Mirror(url, run_dir)
    for version in (5, 10):
        make(run_dir, version)
        mirror.update()
    assert mirror.versions() == [5, 10]
    shutil.rmtree(directory_of(run_dir, 5))
    make(run_dir, 15, recorded=16)
    mirror.update()
    assert mirror.versions() == [10, 15]
    back = tmp_path / "other machine" / run_dir.name
    Mirror(url, back).fetch()
    assert versions(back) == [15]
    content = (directory_of(back, 15) / "inner" / "rank_0000.safetensors").read_bytes()
    assert content == bytes([15]) * 1000
    assert steps(back) == [5, 10, 16]
    assert (back / "metrics.jsonl").read_text() == "to 16\n"
    names = {path.name for path in back.iterdir()}
    assert names == {"checkpoints", "config.yaml", "metrics.jsonl", STORE_FILE}
    with pytest.raises(ConfigError, match="exists already"):
        mirror.fetch()
    fs, root = fsspec.core.url_to_fs(url)
    there = f"{root}/{run_dir.name}"
    stored = [name.rpartition("/")[2] for name in fs.ls(there, detail=False)]
    assert [name for name in stored if name.startswith("ledger_")] == ["ledger_000015.sqlite"]
    for version in (10, 15):
        fs.rm_file(f"{there}/step_{version:06d}.complete")
    unfinished = tmp_path / "third machine" / run_dir.name
    with pytest.raises(ConfigError, match="has no complete copy"):
        Mirror(url, unfinished).fetch()
    assert not unfinished.parent.exists()


def test_a_checkpoint_that_is_saved_again_replaces_its_copy_and_meanwhile_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner went back, and came to the version with other weights. tests/world has a power
    loss at each sync.
    """
    run_dir = tmp_path / "run"
    mirror = Mirror(str(tmp_path / "elsewhere"), run_dir)
    make(run_dir, 5)
    # Of a learner that was killed in the middle of its copy.
    (run_dir / "ledger.partial").write_bytes(b"cut off" * 5000)
    mirror.update()
    assert not (run_dir / "ledger.partial").exists()
    assert (tmp_path / "elsewhere" / "run").stat().st_mode & 0o777 == 0o700
    directory = directory_of(run_dir, 5)
    (directory / "index.json").write_text("of another history")
    write_sums(directory, sums_of(directory))

    def full(*_: object) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("async_rl.training.mirror.snapshot", full)
        with pytest.raises(InfrastructureError, match="the disk is full"):
            mirror.update()
    assert mirror.versions() == []
    mirror.update()
    assert mirror.versions() == [5]
    there = tmp_path / "elsewhere/run/step_000005/index.json"
    assert there.read_text() == "of another history"
    # Nothing is new: the records of the copy stay those of its checkpoint.
    record(run_dir, 6)
    mirror.update()
    back = tmp_path / "back" / "run"
    (back.parent / "run.partial" / "left").mkdir(parents=True)
    Mirror(str(tmp_path / "elsewhere"), back).fetch()
    assert steps(back) == [5]
    assert not (back / "left").exists()


def test_a_copy_with_a_name_that_leads_elsewhere_is_not_brought_back(tmp_path: Path) -> None:
    """Object stores have names, not directories: two dots are a name like any other."""
    run_dir = tmp_path / "run"
    url = "memory://crafted"
    make(run_dir, 5)
    Mirror(url, run_dir).update()
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{root}/run/step_000005/../../../escaped", b"x")
    with pytest.raises(ConfigError, match=r"step_000005/\.\./\.\./\.\./escaped leads out"):
        Mirror(url, tmp_path / "back" / "run").fetch()
    assert not list(tmp_path.rglob("escaped"))


def test_a_place_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match=r"checkpoint\.mirror=nowhere://x cannot be used"):
        Mirror("nowhere://x", tmp_path)
    (tmp_path / "file").write_text("")
    make(tmp_path / "run", 5)
    with pytest.raises(InfrastructureError, match="cannot be written"):
        Mirror(str(tmp_path / "file"), tmp_path / "run").update()
