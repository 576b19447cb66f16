"""Copies of the checkpoints at another place, given by any fsspec URL (s3://, gs://, hdfs://, a directory elsewhere).

A copy of version v is `<url>/<run>/step_<v>` with a file `step_<v>.complete` beside it, which is written last and deleted first: object
stores know no rename. What the local folder no longer keeps is deleted there too.
Used by the learner's Saver and, where the local folder was lost, by the learner at its start.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import fsspec

from async_rl.errors import InfrastructureError
from async_rl.processes import checkpoints

_DONE = ".complete"


class Mirror:
    """The copies of one run. Every call may block for as long as the place takes."""

    def __init__(self, url: str, run_dir: Path) -> None:
        self._url = url
        self._run_dir = run_dir
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError, OSError) as error:
            raise InfrastructureError(f"checkpoint.mirror={url} cannot be used: {error}") from error
        self._root = f"{root.rstrip('/')}/{run_dir.name}"

    def update(self) -> None:
        """Copies what is missing there and deletes what is kept no more. Raises InfrastructureError if that cannot be done."""
        kept = checkpoints.versions(self._run_dir)
        try:
            there = self.versions()
            self._fs.makedirs(self._root, exist_ok=True)
            for version in sorted(set(kept) - set(there)):
                directory = checkpoints.directory_of(self._run_dir, version)
                for path in sorted(p for p in directory.rglob("*") if p.is_file()):
                    target = f"{self._root}/{directory.name}/{path.relative_to(directory)}"
                    self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
                    self._fs.put_file(str(path), target)
                self._fs.pipe_file(f"{self._root}/{directory.name}{_DONE}", b"complete")
            for version in set(there) - set(kept):
                name = checkpoints.directory_of(self._run_dir, version).name
                self._fs.rm_file(f"{self._root}/{name}{_DONE}")
                self._fs.rm(f"{self._root}/{name}", recursive=True)
        except OSError as error:
            raise InfrastructureError(f"checkpoint.mirror={self._url} cannot be written: {error}") from error

    def versions(self) -> list[int]:
        """Versions of the complete copies, oldest first."""
        if not self._fs.exists(self._root):
            return []
        names = (path.rpartition("/")[2] for path in self._fs.ls(self._root, detail=False, refresh=True))
        return sorted(int(name.removeprefix("step_").removesuffix(_DONE)) for name in names if name.endswith(_DONE))

    def fetch_newest(self) -> None:
        """Brings the newest copy to the local folder, if that has no checkpoint at all."""
        try:
            there = self.versions()
            if checkpoints.versions(self._run_dir) or not there:
                return
            directory = checkpoints.directory_of(self._run_dir, there[-1])
            partial = directory.with_name(directory.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            for path in self._fs.find(f"{self._root}/{directory.name}"):
                target = partial / path.partition(f"/{directory.name}/")[2]
                target.parent.mkdir(parents=True, exist_ok=True)
                self._fs.get_file(path, str(target))
            partial.rename(directory)
        except OSError as error:
            raise InfrastructureError(f"checkpoint.mirror={self._url} cannot be read: {error}") from error
