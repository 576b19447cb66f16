"""A program for the jail: describes the tensors of a checkpoint of torch.distributed.checkpoint.

Standard input is the checkpoint's `.metadata`, a pickle. Standard output is JSON: by name the
dtype, the shape, and in the order of the rows the file, offset and length of what torch.save wrote.
The pickle is read without torch and without an import of what it names: each class and function
becomes a stub that keeps its arguments.
"""

from __future__ import annotations

import json
import pickle
import sys
from typing import IO, Any


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
        return type(name, (_Stub,), {})


def describe(file: IO[bytes]) -> dict[str, dict[str, Any]]:
    """Return the description."""
    metadata = _Unpickler(file).load().state
    described = {}
    for name, stored in metadata["state_dict_metadata"].items():
        # Objects other than tensors have no state.
        if stored.state:
            dtype = stored.state["properties"].state[0].__name__
            shape = stored.state["size"].arguments[0]
            described[name] = {"dtype": dtype, "shape": shape, "pieces": []}
    pieces = [
        (key.state["offset"].arguments, key.state["fqn"], info.state)
        for key, info in metadata["storage_data"].items()
        if key.state["fqn"] in described
    ]
    for _, name, place in sorted(pieces, key=lambda piece: piece[0]):
        values = [place[field] for field in ("relative_path", "offset", "length")]
        described[name]["pieces"].append(values)
    return described


if __name__ == "__main__":
    json.dump(describe(sys.stdin.buffer), sys.stdout)
