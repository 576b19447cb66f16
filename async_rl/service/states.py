"""What training runs have on the disk: weights, moments, numbers.

Invariants
- A directory with its final name is complete and on the disk, with the checksums of its files.
- Nothing that a file says is executed.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from async_rl.core.checksums import complete, damage, sums_of
from async_rl.core.errors import DataError
from async_rl.service.tenants import Numbers, State, Tenant

_NUMBERS = "state.json"
_TENSORS = "state.safetensors"


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


def read_state(directory: Path, base_sha256: str) -> State:
    """Return numbers and tensors of a whole state. Raises DataError for a damaged one, and for one
    of another base model.
    """
    if problem := damage(directory):
        raise DataError(f"{directory.name} cannot be read: {problem}")
    try:
        numbers = msgspec.json.decode((directory / _NUMBERS).read_bytes(), type=Numbers)
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(f"{directory.name} is not a state of a training run: {error}") from error
    if numbers.base_sha256 != base_sha256:
        raise DataError(f"{directory.name} is of another base model")
    return State(numbers=numbers, tensors=load_file(directory / _TENSORS))
