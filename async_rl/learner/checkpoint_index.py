"""The index of a checkpoint: which file has which rows of each tensor, and all that is no tensor.

docs/checkpoints.md describes the format for readers without this project.
"""

import stat
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from async_rl.core.errors import DataError
from async_rl.core.frozen import Value

INDEX_FILE = "index.json"
# A thousand ranks with a thousand tensors each need 100 MB.
_MAX_BYTES = 1 << 30
Size = Annotated[int, msgspec.Meta(ge=0)]
# No other name, so none leads out of the directory.
FileName = Annotated[str, msgspec.Meta(pattern=r"^rank_[0-9]{4,6}\.safetensors\Z")]


class Stored(Value):
    """A tensor. dtype: as in safetensors; pieces: file, first row in it, row after its last one, in
    the order of the rows.
    """

    dtype: str
    shape: Annotated[list[Size], msgspec.Meta(min_length=1)]
    pieces: list[tuple[FileName, Size, Size]]


class Optimizer(Value):
    """An optimizer. settings: of AdamW for matrices, as information: a resume has its own."""

    num_steps: float
    settings: dict[str, Any]


class Index(Value):
    """A checkpoint. objective: as `ObjectiveState.numbers`; base_sha256: of the weights that its
    adapter belongs to, empty without one.
    """

    format: Literal[3]
    version: Size
    optimizers: dict[str, Optimizer]
    objective: tuple[float, float, float, float]
    base_sha256: str
    tensors: dict[str, Stored]


def file_of(rank: int) -> str:
    """Return the name of the file of a rank."""
    return f"rank_{rank:04d}.safetensors"


def open_shard(path: Path) -> Any:
    """Open a safetensors file for slices of its tensors. Raises DataError that names it."""
    from safetensors import SafetensorError, safe_open  # of an extra

    try:
        return safe_open(regular(path), framework="pt")
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} is damaged: {error}") from error


def regular(path: Path) -> Path:
    """Return the path of a file. Raises OSError if there is none, DataError for another thing."""
    # The opening of a pipe would wait, and a link may lead anywhere.
    if not stat.S_ISREG(path.lstat().st_mode):
        raise DataError(f"{path} is not a regular file; restore it from a copy")
    return path


def read_index(directory: Path) -> Index:
    """Read the index of a checkpoint. Raises DataError."""
    path = directory / INDEX_FILE
    if not path.exists():
        raise DataError(
            f"{directory} is not a checkpoint; name a directory such as checkpoints/step_000020"
            " of a run"
        )
    try:
        with regular(path).open("rb") as file:
            index = msgspec.json.decode(file.read(_MAX_BYTES), type=Index)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}; restore it from a copy") from error
    for name, stored in index.tensors.items():
        rows = [row for _, *span in stored.pieces for row in span]
        edges = [0, *rows, stored.shape[0]]
        # Each piece starts where the previous piece stops.
        if edges[::2] != edges[1::2] or edges != sorted(edges):
            raise DataError(
                f"{path} is damaged: {name} of shape {stored.shape} has pieces from and to the rows"
                f" {rows}; restore it from a copy"
            )
    return index
