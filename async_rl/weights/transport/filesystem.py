"""Versions as safetensors files at any fsspec URL, for generators that do not share the learner's
memory.

A file has one version, its tensors in the manifest's order, version and checksum in its metadata;
any reader of safetensors opens it. Calls block for as long as the storage takes.
Invariant: a generator receives the URL of a file only after the file is complete, and compares the
content with the manifest of the push.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Collection, Iterator
from typing import IO, Self

import fsspec
import numpy as np

from async_rl.core.errors import ConfigError, WeightsError
from async_rl.protocol.weights import SHARED_BLOCK, Manifest, Source, StoredFile
from async_rl.weights.membership import Life, Load, Membership
from async_rl.weights.transport.base import LearnerSide, Sender
from async_rl.weights.transport.shared_memory import Bytes, SharedTensors, SharedTensorsReader

_SUFFIX = ".safetensors"
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_ALIGN = 8


class FileSender(Sender):
    """Writes the file of a version when the first member needs it, in a folder (an fsspec URL).

    The configuration is checked so that every generator can open the URL.
    """

    reads_block = False

    def __init__(self, learner: LearnerSide) -> None:
        super().__init__(learner)
        self._folder = learner.folder
        self._has_written = False
        self._loading: set[int] = set()
        self._writing: dict[int, asyncio.Task[str]] = {}

    async def source(self, manifest: Manifest, load: Load, life: Life) -> StoredFile:
        """Return the URL once the file is complete. Raises ConfigError if it cannot be written."""
        writing = self._writing.get(manifest.version)
        if writing is None:
            write = asyncio.to_thread(self.write, manifest, keep=self._loading)
            writing = asyncio.create_task(write, name="write weights")
            self._writing = {manifest.version: writing}
        # One member's deadline must not cancel the file that others wait for.
        return StoredFile(url=await asyncio.shield(writing))

    async def leave(self, membership: Membership) -> None:
        """Note the versions whose files are still being read."""
        self._loading = membership.loading

    def write(self, manifest: Manifest, *, keep: Collection[int] = ()) -> str:
        """Copy the block into a file and return its URL; delete files of versions not in `keep`.

        Raises ConfigError if the file cannot be written.
        """
        try:
            fs, folder = fsspec.core.url_to_fs(self._folder)
            path = f"{folder}/version_{manifest.version}{_SUFFIX}"
            fs.makedirs(folder, exist_ok=True)
            # Files of versions that a generator still reads stay.
            kept = tuple(f"/version_{version}{_SUFFIX}" for version in keep)
            for old in fs.glob(f"{folder}/*{_SUFFIX}"):
                if not old.endswith(kept):
                    fs.rm_file(old)
            with SharedTensorsReader(manifest) as reader, fs.open(path, "wb") as file:
                file.write(_header(manifest))
                for _, data in reader.tensors():
                    file.write(data.data)
                # A new version in the block would have mixed two versions in the file.
                reader.verify_unchanged()
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(
                f"version {manifest.version} cannot be written to {self._folder} ({error}); set"
                " weights.transfer.path to a directory with enough space"
            ) from error
        self._has_written = True
        return str(fs.unstrip_protocol(path))

    def close(self) -> None:
        """Delete the remaining files: without the learner's manifest no generator reads them."""
        if self._has_written:
            # If the storage has gone, so have the files.
            with contextlib.suppress(OSError):
                fs, folder = fsspec.core.url_to_fs(self._folder)
                for path in fs.glob(f"{folder}/*{_SUFFIX}"):
                    fs.rm_file(path)


class FileReader:
    """Reads a file once per generator, into a block that all of its ranks map.

    The block is reused as long as the tensors keep their shapes.
    """

    def __init__(self) -> None:
        self._block: SharedTensors | None = None
        self._announced: Manifest | None = None
        self._one_at_a_time = threading.Lock()

    def localize(self, manifest: Manifest, source: Source) -> tuple[Manifest, Source]:
        """Fetch the version if it is in a file; return the source for its ranks."""
        if not isinstance(source, StoredFile):
            return manifest, source
        return self.fetch(source.url, manifest), SHARED_BLOCK

    def fetch(self, url: str, manifest: Manifest) -> Manifest:
        """Read the file into the block and return the manifest of the block.

        Raises WeightsError unless the content is exactly what the manifest announces.
        """
        with self._one_at_a_time:
            try:
                with fsspec.open(url, "rb") as file:
                    header = _header(manifest)
                    if file.read(len(header)) != header:
                        raise WeightsError(
                            f"{url} does not have the version {manifest.version} that the learner"
                            " announced"
                        )
                    block = self._block_for(manifest)
                    local = block.write(manifest.version, _tensors(file, manifest))
            except (OSError, ValueError, ImportError) as error:
                raise WeightsError(
                    f"version {manifest.version} cannot be read from {url}"
                    f" (weights.transfer.path): {error}"
                ) from error
        if local.checksum != manifest.checksum:
            raise WeightsError(
                f"checksum of {url} is {local.checksum}, announced {manifest.checksum}"
            )
        return local

    def _block_for(self, manifest: Manifest) -> SharedTensors:
        announced = self._announced
        if self._block is None or announced is None or announced.tensors != manifest.tensors:
            self.close()
            self._block = SharedTensors(manifest.tensors, manifest.total_bytes)
            self._announced = manifest
        return self._block

    def close(self) -> None:
        """Free the block."""
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
    """The start of a safetensors file: size of the JSON in 8 bytes, then the JSON, padded with
    spaces.
    """
    entries: dict[str, object] = {
        "__metadata__": {"version": str(manifest.version), "checksum": str(manifest.checksum)}
    }
    end = 0
    for entry in manifest.tensors:
        begin = end
        end = end + entry.size_bytes
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise WeightsError(
                f"{entry.name} has dtype {entry.dtype}; allowed are {', '.join(_DTYPES)}"
            )
        entries[entry.name] = {"dtype": dtype, "shape": entry.shape, "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    # The format aligns the data to 8 bytes, and readers map it into memory.
    text += b" " * (-len(text) % _ALIGN)
    return len(text).to_bytes(8, "little") + text
