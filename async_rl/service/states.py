"""The states of training runs on the disk, and their checkpoints: weights, moments, numbers.

Invariants
- A directory with its final name is complete and on the disk, with the checksums of its files.
- Two states of a run are kept. A damaged one is not read; the older one is.
- Nothing that a file says is executed.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from async_rl.core.checksums import complete, damage, sums_of
from async_rl.core.errors import DataError
from async_rl.service.tenants import Numbers, State, Tenant

_PREFIX = "state-"
_KEPT = 2
_NUMBERS = "state.json"
_TENSORS = "state.safetensors"
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def written(directory: Path) -> Iterator[Path]:
    """Yield an empty directory, which gets this name once what the block has written is on the
    disk. It replaces a directory of that name. Raises DataError if it cannot be written.
    """
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        shutil.rmtree(directory, ignore_errors=True)
        complete(partial, directory, sums_of(partial))
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{directory.name} could not be written: {error}; free disk space or grant write"
            " permission, then save again"
        ) from error


def write_state(run: Tenant, directory: Path) -> None:
    """Write weights, moments and numbers."""
    (directory / _NUMBERS).write_bytes(msgspec.json.encode(run.numbers))
    save_file(run.tensors(), directory / _TENSORS)


def _numbers_in(directory: Path) -> Numbers:
    return msgspec.json.decode((directory / _NUMBERS).read_bytes(), type=Numbers)


def read_state(directory: Path, base_sha256: str) -> State:
    """Return numbers and tensors of a whole state. Raises DataError for a damaged one, and for one
    of another base model.
    """
    if problem := damage(directory):
        raise DataError(f"{directory.name} cannot be read: {problem}")
    try:
        numbers = _numbers_in(directory)
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(f"{directory.name} is no state of a training run: {error}") from error
    if numbers.base_sha256 != base_sha256:
        raise DataError(f"{directory.name} is of another base model")
    return State(numbers=numbers, tensors=load_file(directory / _TENSORS))


class States:
    """The states of one run. directory: of the run."""

    def __init__(self, directory: Path, base_sha256: str) -> None:
        self._directory = directory
        self._base_sha256 = base_sha256

    def _kept(self) -> list[tuple[int, Path]]:
        """The states, the newest first."""
        found = self._directory.glob(f"{_PREFIX}*[0-9]")
        return sorted(((int(p.name.removeprefix(_PREFIX)), p) for p in found), reverse=True)

    @property
    def covered(self) -> int:
        """The newest request that two states cover, so that no damage of one of them can require
        its repetition; -1 = none.
        """
        kept = self._kept()
        return kept[_KEPT - 1][0] if len(kept) >= _KEPT else -1

    @property
    def version(self) -> int:
        """The version of the newest state, damaged or not; 0 without one."""
        for _, path in self._kept():
            with contextlib.suppress(OSError, msgspec.DecodeError):
                return _numbers_in(path).version
        return 0

    def save(self, run: Tenant) -> None:
        """Write the state of the run, unless it is written, and delete the oldest one. Without a
        new state the front keeps the requests, so a full disk is a warning here.
        """
        if (kept := self._kept()) and kept[0][0] == run.numbers.seq_id:
            return
        try:
            with written(self._directory / f"{_PREFIX}{run.numbers.seq_id}") as partial:
                write_state(run, partial)
        except DataError as error:
            _log.warning("%s: %s", run.run_id, error)
            return
        for _, path in self._kept()[_KEPT:]:
            shutil.rmtree(path)

    def newest(self) -> State | None:
        """Return the newest state that is whole; None if there is none. Raises DataError if all are
        damaged: the requests that they cover are gone.
        """
        damaged = []
        for _, path in self._kept():
            try:
                state = read_state(path, self._base_sha256)
            except DataError as error:
                _log.warning("%s", error)
                damaged.append((path, error))
                continue
            for older, _ in damaged:
                # Its name becomes free, and it no longer counts as a state.
                older.rename(older.with_name(f"damaged-{older.name}"))
            return state
        if damaged:
            raise damaged[0][1]
        return None
