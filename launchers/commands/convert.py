"""`async-rl convert`: a checkpoint of an earlier version gets the present format.

Invariants: its pickle is read in the jail and nowhere else, by a program that sees no file of the
host; the answer of the program is checked as one of a stranger; the earlier files are kept.
"""

import io
import shutil
import sys
import zipfile
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from async_rl.core.checksums import complete, damage, sums_of
from async_rl.core.errors import ConfigError, DataError, InfrastructureError
from async_rl.core.frozen import Value
from async_rl.core.os import sync
from async_rl.launchers.jail import run_in_jail
from async_rl.learner.checkpoint_index import (
    INDEX_FILE,
    OLD_FILE,
    Index,
    Optimizer,
    Size,
    Stored,
    file_of,
    old_format,
    regular,
)
from async_rl.sandbox.cell import CellFailed
from async_rl.sandbox.protocol import Profile
from async_rl.training.checkpoints import set_aside

_PROGRAM = "torch_checkpoint.py"
# Pickle and description of a thousand ranks have a fifth of this.
_MEMORY_BYTES = 2 << 30
_LIMIT_S = 600.0
_FORMAT = 2
_CODES = {"float32": "F32", "uint8": "U8"}
"""Of the tensors that are kept; integers and float64 become values of the index."""


class _Tensor(Value):
    """A tensor as the jail describes it. pieces: file, offset and length in it."""

    dtype: Literal["float64", "int64", "float32", "uint8"]
    shape: list[Size]
    pieces: list[
        tuple[Annotated[str, msgspec.Meta(pattern=r"^__[0-9]+_[0-9]+\.distcp\Z")], Size, Size]
    ]


def convert(
    directory: Annotated[Path, typer.Argument(help="such as RUN/checkpoints/step_000020")],
) -> None:
    """Convert a checkpoint of an earlier version, which can run code when it is read, in a jail.

    Examples: async-rl convert runs/my-run/checkpoints/step_000020
    """
    if not old_format(directory):
        raise ConfigError(f"{directory} is not a checkpoint of an earlier version")
    if reason := damage(directory):
        raise DataError(f"{directory} is damaged: {reason}; convert another checkpoint")
    try:
        kept = _convert(directory)
    except (CellFailed, OSError) as error:
        raise InfrastructureError(f"{directory} cannot be converted: {error}") from error
    typer.echo(f"{directory} is converted; the earlier files are in {kept}")


def _convert(directory: Path) -> Path:
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    output, errors, _ = run_in_jail(
        [sys.executable, "-I", "-S", "-B", _PROGRAM],
        {_PROGRAM: files("async_rl.sandbox").joinpath(_PROGRAM).read_bytes()},
        profile=Profile.PROGRAM,
        cpu_s=_LIMIT_S,
        memory_bytes=_MEMORY_BYTES,
        stdin=regular(directory / OLD_FILE).read_bytes(),
    )
    try:
        tensors = msgspec.json.decode(output, type=dict[str, _Tensor])
        index = _write(directory, tensors, partial / file_of(0))
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
        reason = errors.decode(errors="replace")[-200:] or repr(error)
        raise DataError(f"{directory} is damaged: {reason}; convert another checkpoint") from error
    (partial / INDEX_FILE).write_bytes(msgspec.json.encode(index))
    converted = directory.with_name(directory.name + ".converted")
    complete(partial, converted, sums_of(partial))
    # Both are complete and on the disk at any time.
    kept = set_aside(directory)
    converted.rename(directory)
    sync(directory.parent)
    return kept


def _saved(path: Path, offset: int, length: int) -> bytes:
    """Return the data of the tensor that torch.save has written into a part of a file."""
    with regular(path).open("rb") as file:
        file.seek(offset)
        archive = zipfile.ZipFile(io.BytesIO(file.read(length)))
    (data,) = (entry for entry in archive.infolist() if entry.filename.endswith("/data/0"))
    # torch never compresses; a small archive could unfold to any size.
    if data.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{path} is compressed")
    return archive.read(data)


def _write(directory: Path, tensors: Mapping[str, _Tensor], target: Path) -> Index:
    """Write the tensors of a checkpoint into one file and return their index."""
    import numpy as np
    from safetensors.numpy import save_file  # of an extra

    def values(name: str) -> Any:
        tensor = tensors[name]
        content = b"".join(_saved(directory / file, *place) for file, *place in tensor.pieces)
        return np.frombuffer(content, tensor.dtype).reshape(tensor.shape)

    kept = {name: values(name) for name, x in tensors.items() if x.dtype in _CODES and x.shape}
    save_file(kept, target, {"format": "pt"})
    earlier, version = values("version").tolist()
    if earlier != _FORMAT:
        raise ValueError(f"format {earlier} in place of {_FORMAT}")
    return Index(
        format=3,
        version=version,
        optimizers={
            name.partition(".optimizer.")[0]: Optimizer(num_steps=float(values(name)), settings={})
            for name in tensors
            if name.endswith(".step")
        },
        objective=tuple(values("objective.numbers").tolist()),
        base_sha256=values("base.sha256").tobytes().hex() if "base.sha256" in tensors else "",
        tensors={
            name: Stored(
                dtype=_CODES[x.dtype.name], shape=list(x.shape), pieces=[(file_of(0), 0, len(x))]
            )
            for name, x in kept.items()
        },
    )
