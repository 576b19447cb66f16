"""Versions as safetensors files at any fsspec URL: for generators that do not share the learner's
memory.

A file holds one version, its tensors in the manifest's order, version and checksum in its metadata;
any reader of safetensors opens it. Invariant: generators hear of a file only once it is complete,
and check what they read against the manifest that came with the push. The learner writes
(`WeightFiles`), a generator reads into a block of its own (`FileReader`); calls block for as long
as the place takes.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Collection, Iterator
from typing import IO, Self

import fsspec
import numpy as np

from async_rl.core.errors import ConfigError, WeightsError
from async_rl.protocol.weights import Manifest
from async_rl.weights.transport.shared_memory import Bytes, SharedTensors, SharedTensorsReader

_SUFFIX = ".safetensors"
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_ALIGN = 8


class WeightFiles:
    """The learner's side: the newest version that anybody asked for, in a folder of its own (an
    fsspec URL).
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._has_written = False

    def write(self, manifest: Manifest, *, keep: Collection[int] = ()) -> str:
        """Copies the block into a file; returns its URL. Deletes the others, but for the versions
        that somebody still reads.

        Raises ConfigError if the place refuses it.
        """
        try:
            fs, folder = fsspec.core.url_to_fs(self._folder)
            path = f"{folder}/version_{manifest.version}{_SUFFIX}"
            fs.makedirs(folder, exist_ok=True)
            kept = tuple(f"/version_{version}{_SUFFIX}" for version in keep)
            for old in fs.glob(f"{folder}/*{_SUFFIX}"):
                if not old.endswith(kept):
                    fs.rm_file(old)
            with SharedTensorsReader(manifest) as reader, fs.open(path, "wb") as file:
                file.write(_header(manifest))
                for _, data in reader.tensors():
                    file.write(data.data)
                reader.verify_unchanged()
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(
                f"version {manifest.version} cannot be written to {self._folder} ({error}); give a"
                " place with room in weights.path"
            ) from error
        self._has_written = True
        return str(fs.unstrip_protocol(path))

    def close(self) -> None:
        """Deletes the last files: without the learner's manifest nobody reads them."""
        if self._has_written:
            with contextlib.suppress(OSError):  # the place is gone, and with it the files
                fs, folder = fsspec.core.url_to_fs(self._folder)
                for path in fs.glob(f"{folder}/*{_SUFFIX}"):
                    fs.rm_file(path)


class FileReader:
    """The generator's side: one block of its own, reused as long as the tensors keep their shapes."""

    def __init__(self) -> None:
        self._block: SharedTensors | None = None
        self._announced: Manifest | None = None
        self._one_at_a_time = threading.Lock()

    def fetch(self, url: str, manifest: Manifest) -> Manifest:
        """Reads the file into the block; the manifest of that. Raises WeightsError unless it is
        exactly what was announced.
        """
        with self._one_at_a_time:
            try:
                with fsspec.open(url, "rb") as file:
                    if (header := _header(manifest)) != file.read(len(header)):
                        raise WeightsError(
                            f"{url} does not hold the version {manifest.version} that the learner"
                            " announced"
                        )
                    found = self._block_for(manifest).write(
                        manifest.version, _tensors(file, manifest)
                    )
            except (OSError, ValueError, ImportError) as error:
                raise WeightsError(
                    f"version {manifest.version} cannot be read from {url} (weights.path): {error}"
                ) from error
        if found.checksum != manifest.checksum:
            raise WeightsError(
                f"checksum of {url} is {found.checksum}, announced {manifest.checksum}"
            )
        return found

    def _block_for(self, manifest: Manifest) -> SharedTensors:
        if (
            self._block is None
            or self._announced is None
            or self._announced.tensors != manifest.tensors
        ):
            self.close()
            self._block, self._announced = (
                SharedTensors(manifest.tensors, manifest.total_bytes),
                manifest,
            )
        return self._block

    def close(self) -> None:
        """Gives the block back."""
        if self._block is not None:
            self._block.close()
            self._block = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tensors(file: IO[bytes], manifest: Manifest) -> Iterator[Bytes]:
    for entry in manifest.tensors:
        yield np.frombuffer(file.read(entry.size_bytes), np.uint8)


def _header(manifest: Manifest) -> bytes:
    """The beginning of a safetensors file: size of the JSON in 8 bytes, then the JSON, filled with
    spaces.
    """
    entries: dict[str, object] = {
        "__metadata__": {"version": str(manifest.version), "checksum": str(manifest.checksum)}
    }
    end = 0
    for entry in manifest.tensors:
        begin, end = end, end + entry.size_bytes
        if (dtype := _DTYPES.get(entry.dtype)) is None:
            raise WeightsError(
                f"{entry.name} has dtype {entry.dtype}; allowed are {', '.join(_DTYPES)}"
            )
        entries[entry.name] = {"dtype": dtype, "shape": entry.shape, "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _ALIGN)
    return len(text).to_bytes(8, "little") + text
