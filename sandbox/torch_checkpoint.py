"""A program for the jail: writes a checkpoint of torch.distributed.checkpoint as one safetensors
file to standard output, with the index of the checkpoint (docs/checkpoints.md) in its metadata.

Its pickle is read without torch and without an import of what it names: each class and function
becomes a stub that keeps its arguments. Only Python itself is there.
"""

from __future__ import annotations

import collections
import io
import json
import math
import pickle
import struct
import sys
import zipfile
from typing import IO, Any

_CODES = {
    "torch.float64": ("F64", 8),
    "torch.int64": ("I64", 8),
    "torch.float32": ("F32", 4),
    "torch.uint8": ("U8", 1),
}
_FILE = "rank_0000.safetensors"


class _Stub:
    """An object of a class that was not imported, or the result of such a function."""

    arguments: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *arguments: Any) -> _Stub:
        made = object.__new__(cls)
        made.arguments = arguments
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[_Stub]:
        return type(f"{module}.{name}", (_Stub,), {})


def convert(directory: str, output: IO[bytes]) -> None:
    """Write the file. Its reader checks its size."""
    with open(f"{directory}/.metadata", "rb") as file:
        metadata = _Unpickler(file).load().state
    pieces = collections.defaultdict(list)
    for key, info in metadata["storage_data"].items():
        offset = key.state.get("offset")
        rows = offset.arguments if offset else ()
        pieces[key.state["fqn"]].append((rows, info.state))

    def content(name: str) -> bytes:
        # Sharded by rows, so the pieces follow each other.
        places = (place for _, place in sorted(pieces[name], key=lambda piece: piece[0]))
        return b"".join(_stored(directory, **place) for place in places)

    tensors = {}
    for name, described in metadata["state_dict_metadata"].items():
        # None for objects other than tensors.
        if described.state:
            code, size = _CODES[described.state["properties"].state[0].__name__]
            tensors[name] = (size, code, list(described.state["size"].arguments[0]) or [1])
    entries: dict[str, Any] = {}
    index: dict[str, Any] = {"tensors": {}, "optimizers": {}, "base_sha256": ""}
    end = 0
    for name, (size, code, shape) in tensors.items():
        begin = end
        end = begin + size * math.prod(shape)
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
        index["tensors"][name] = {"dtype": code, "shape": shape, "pieces": [[_FILE, 0, shape[0]]]}
        if name.endswith(".step"):
            (steps,) = struct.unpack("<f", content(name))
            index["optimizers"][name.partition(".optimizer.")[0]] = {
                "num_steps": steps,
                "settings": {},
            }
    if "base.sha256" in tensors:
        index["base_sha256"] = content("base.sha256").hex()
    index["objective"] = struct.unpack("<4d", content("objective.numbers"))
    earlier, index["version"] = struct.unpack("<2q", content("version"))
    # This format is one later.
    index["format"] = earlier + 1
    entries["__metadata__"] = {"format": "pt", "index": json.dumps(index)}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    output.write(len(text).to_bytes(8, "little") + text)
    output.writelines(map(content, tensors))


def _stored(directory: str, relative_path: str, offset: int, length: int, **_: object) -> bytes:
    """Return the data of a tensor that torch.save has written into a part of a file."""
    with open(f"{directory}/{relative_path}", "rb") as file:
        file.seek(offset)
        with zipfile.ZipFile(io.BytesIO(file.read(length))) as archive:
            return archive.read(next(x for x in archive.namelist() if x.endswith("/data/0")))


if __name__ == "__main__":
    convert(sys.argv[1], sys.stdout.buffer)
