"""Copies of a run at any fsspec URL (s3://, gs://, hdfs://, a directory). Each can be resumed.

In `<url>/<run>/`: the checkpoints `step_<v>` that the local folder keeps, the ledger
`ledger_<v>.sqlite` of the newest of them, and in `files/` the configurations and records. A file
`step_<v>.complete` is written last and deleted first: object stores have no rename. It has the
checkpoint's checksums, because a run that went back may save another checkpoint of that version.
"""

import os
import shutil
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from async_rl.buffer.store.connection import STORE_FILE, snapshot
from async_rl.config.pools import SCALE_FILE
from async_rl.core.checksums import SUMS_FILE
from async_rl.core.errors import ConfigError, InfrastructureError
from async_rl.core.os import sync, sync_tree
from async_rl.training import checkpoints

_DONE = ".complete"
# Whole at each copy, as the ledger is, which is larger: object stores cannot append.
_RECORDS = ("config*.yaml", SCALE_FILE, "versions.jsonl", "events.jsonl", "metrics.jsonl")
_FILES = "files/"
"""A separate folder: next to the checkpoints they would make the copy look like a run."""


class Mirror:
    """The copies of one run. Every call may block for as long as the storage takes."""

    def __init__(self, url: str, run_dir: Path) -> None:
        self._url = url
        self._run_dir = run_dir
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError, OSError) as error:
            raise InfrastructureError(f"checkpoint.mirror={url} cannot be used: {error}") from error
        self._root = f"{root.rstrip('/')}/{run_dir.name}"

    def update(self) -> None:
        """Copy new checkpoints and delete copies of checkpoints that the run no longer keeps.

        Raises InfrastructureError if the storage fails.
        """
        kept = checkpoints.versions(self._run_dir)
        try:
            copied = {
                version: self._fs.cat_file(self._mark(version)) for version in self.versions()
            }
            self._fs.makedirs(self._root, exist_ok=True)
            if isinstance(self._fs, LocalFileSystem):
                os.chmod(self._root, 0o700)  # of an earlier version, it may be open to other users
            for version in kept:
                self._copy(version, copied.pop(version, b""))
            # Before the files: a copy whose files are being deleted must not count as one.
            for version in copied:
                self._fs.rm_file(self._mark(version))
            self._sync()
            for version in copied:
                self._fs.rm(f"{self._root}/{_name(version)}", recursive=True)
            # After the mark of the newest copy: until then a resume needs the previous ledger.
            for name in self._names():
                if name.startswith("ledger_") and name != _ledger(kept[-1]):
                    self._fs.rm_file(f"{self._root}/{name}")
        except OSError as error:
            raise InfrastructureError(
                f"checkpoint.mirror={self._url} cannot be written: {error}"
            ) from error

    def _copy(self, version: int, marked: bytes) -> None:
        """Copy a checkpoint with the ledger and the records of the run, unless its copy is
        `marked` as a copy of it.
        """
        directory = checkpoints.directory_of(self._run_dir, version)
        sums = (directory / SUMS_FILE).read_bytes()
        if marked == sums:
            return
        # The mark first: without it, a copy that is half replaced does not count as one.
        if marked:
            self._fs.rm_file(self._mark(version))
            self._sync()
        ledger = self._run_dir / "ledger.partial"
        snapshot(self._run_dir / STORE_FILE, ledger)
        names = {ledger: _ledger(version)}
        for path in directory.rglob("*"):
            if path.is_file():
                names[path] = f"{directory.name}/{path.relative_to(directory)}"
        for pattern in _RECORDS:
            names |= {path: _FILES + path.name for path in self._run_dir.glob(pattern)}
        targets = [f"{self._root}/{name}" for name in names.values()]
        for folder in {target.rpartition("/")[0] for target in targets}:
            self._fs.makedirs(folder, exist_ok=True)
        self._fs.put([str(path) for path in names], targets)
        ledger.unlink()
        # Before the mark, and the mark before the deletion of older copies, whose marks go first.
        self._sync()
        self._fs.pipe_file(self._mark(version), sums)
        self._sync()

    def versions(self) -> list[int]:
        """Return the versions of the complete copies, oldest first."""
        return sorted(
            int(name.removeprefix("step_").removesuffix(_DONE))
            for name in self._names()
            if name.endswith(_DONE)
        )

    def fetch(self) -> None:
        """Create the run's directory, which must not exist, from the newest copy.

        Raises ConfigError if none is complete.
        """
        if self._run_dir.exists():
            raise ConfigError(
                f"{self._run_dir} exists already; resume it by its name, or move it away to take"
                f" the copy of {self._url}"
            )
        try:
            copied = self.versions()
            if not copied:
                raise ConfigError(
                    f"{self._url}/{self._run_dir.name} has no complete copy of a run; pass"
                    " <checkpoint.mirror>/<run name>"
                )
            partial = self._run_dir.with_name(self._run_dir.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            targets = {}
            for path in self._fs.find(self._root):
                name = path.strip("/").removeprefix(self._root.strip("/") + "/")
                # An object store accepts any name, and here it becomes a path.
                if ".." in Path(name).parts:
                    raise ConfigError(
                        f"{self._url}: {name} leads out of the run; remove it from the storage, and"
                        " trust no copy that a stranger can write"
                    )
                if name.startswith(f"{_name(copied[-1])}/"):
                    targets[path] = partial / "checkpoints" / name
                elif name == _ledger(copied[-1]):
                    targets[path] = partial / STORE_FILE
                elif name.startswith(_FILES):
                    targets[path] = partial / name.removeprefix(_FILES)
            for target in targets.values():
                target.parent.mkdir(parents=True, exist_ok=True)
            self._fs.get(list(targets), [str(target) for target in targets.values()])
            # Last: an interrupted fetch must not leave a directory that looks like a run.
            sync_tree(partial)
            partial.rename(self._run_dir)
            sync(self._run_dir.parent)
        except OSError as error:
            raise InfrastructureError(
                f"{self._url}/{self._run_dir.name} cannot be copied to {self._run_dir}: {error}"
            ) from error

    def _sync(self) -> None:
        """Return once all copies are on the disk, if they are in a directory. An object store has a
        file as soon as its call has returned.
        """
        if isinstance(self._fs, LocalFileSystem):
            root = Path(self._root)
            sync_tree(root)
            # The folder and its parent may be new.
            for directory in list(root.parents)[:2]:
                sync(directory)

    def _mark(self, version: int) -> str:
        return f"{self._root}/{_name(version)}{_DONE}"

    def _names(self) -> list[str]:
        if not self._fs.exists(self._root):
            return []
        # refresh: fsspec caches listings, but another learner may have changed the storage.
        return [
            path.rstrip("/").rpartition("/")[2]
            for path in self._fs.ls(self._root, detail=False, refresh=True)
        ]


def _name(version: int) -> str:
    return checkpoints.directory_of(Path(), version).name


def _ledger(version: int) -> str:
    return f"ledger_{version:06d}.sqlite"
