"""A version that went through a file is the version that was published, wherever the file is."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from weights_support import exporter, learner_side

from async_rl.core.errors import BlockUnreachable, WeightsError
from async_rl.protocol.weights import SHARED_BLOCK, Manifest, StoredFile
from async_rl.weights.block import SharedTensors, SharedTensorsReader
from async_rl.weights.files import FileSender
from async_rl.weights.lora import Adapter
from async_rl.weights.receiving import FileReader
from async_rl.weights.tensors import checksum, tensor_spec

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),
    "c": torch.tensor(3.0),
}


def sender(folder: Path | str, **facts: Any) -> FileSender:
    return FileSender(learner_side(folder=str(folder), **facts))


@pytest.fixture
def weights() -> Iterator[SharedTensors]:
    with SharedTensors([tensor_spec(name, it) for name, it in TENSORS.items()]) as block:
        yield block


def path_of(stored: StoredFile) -> Path:
    return Path(stored.url.removeprefix("file://"))


def read(manifest: Manifest) -> dict[str, torch.Tensor]:
    with SharedTensorsReader(manifest) as reader:
        reader.verify()
        return {name: view.clone() for name, view in reader.tensors()}


@pytest.mark.parametrize("place", ["folder", "memory"])
def test_a_reader_has_what_was_written(place: str, tmp_path: Path, weights: SharedTensors) -> None:
    files = sender(f"memory://{tmp_path.name}" if place == "memory" else tmp_path / "deep" / "er")
    with closing(FileReader()) as reader:
        blocks = set()
        for version in (1, 2):
            announced = weights.write(version, [tensor + version for tensor in TENSORS.values()])
            found, source = reader.localize(announced, files.write(announced))
            assert (source, found.version) == (SHARED_BLOCK, version)
            assert found.path != announced.path
            blocks.add(os.stat(found.path).st_ino)
            assert reader.localize(announced, SHARED_BLOCK) == (announced, SHARED_BLOCK)
            tensors = read(found)
            assert all(torch.equal(tensors[name], TENSORS[name] + version) for name in TENSORS)
        assert len(blocks) == 1, "its memory is used again"
    assert not Path(found.path).exists(), "its memory is free"
    files.close()


@pytest.mark.parametrize("is_applied", [True, False])
async def test_only_engines_that_apply_an_adapter_get_its_file_once_for_all_members(
    is_applied: bool, tmp_path: Path, weights: SharedTensors
) -> None:
    """Any reader of safetensors opens the files."""
    adapter = Adapter(tensors={"lora_A": torch.ones(2, 3)}, scaling=2.0)
    files = sender(tmp_path, exporter=exporter(adapter=adapter), is_applied=is_applied)
    load: Any = None
    manifest = weights.write(7, TENSORS.values())
    found = [await files.source(manifest, load, (name, 1)) for name in "ab"]
    assert found[0] == found[1]
    expected = adapter.tensors if is_applied else TENSORS
    content = load_file(path_of(found[0]))
    assert content.keys() == expected.keys()
    assert all(torch.equal(content[name], expected[name]) for name in expected)
    assert found[0].scaling == (2.0 if is_applied else None)
    if is_applied:
        assert found[0].checksum == checksum(path_of(found[0]).read_bytes())


def test_a_damaged_missing_or_other_file_is_refused(tmp_path: Path, weights: SharedTensors) -> None:
    with closing(FileReader()) as reader:
        announced = weights.write(1, TENSORS.values())
        stored = sender(tmp_path).write(announced)
        content = path_of(stored).read_bytes()
        for damaged, problem in (
            (content[:-1] + b"\x77", r"checksum of .* announced"),
            (content[:-2], "has 2 bytes, 4 were announced"),
        ):
            path_of(stored).write_bytes(damaged)
            with pytest.raises(WeightsError, match=problem):
                reader.fetch(stored, announced)
        later = weights.write(2, TENSORS.values())
        with pytest.raises(WeightsError, match="does not have the version 2"):
            reader.fetch(stored, later)
        path_of(stored).unlink()
        with pytest.raises(WeightsError, match=r"cannot be read from .*\(weights.transfer.path\)"):
            reader.fetch(stored, later)


@pytest.mark.parametrize("name", ["none", "link"])
def test_a_block_of_another_machine_is_unreachable_whatever_its_path_leads_to(
    tmp_path: Path, name: str, weights: SharedTensors
) -> None:
    manifest = weights.write(1, TENSORS.values())
    (tmp_path / "link").symlink_to("/dev/zero")
    with pytest.raises(BlockUnreachable):
        SharedTensorsReader(replace(manifest, path=str(tmp_path / name)))


def test_a_version_that_is_overwritten_while_it_is_written_is_not_sent(
    tmp_path: Path, weights: SharedTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push that has missed its deadline leaves a thread that still reads the block."""
    manifest = weights.write(1, TENSORS.values())
    verify = SharedTensorsReader.verify_unchanged

    def late(reader: SharedTensorsReader) -> None:
        weights.write(1, TENSORS.values())
        verify(reader)

    monkeypatch.setattr(SharedTensorsReader, "verify_unchanged", late)
    with pytest.raises(WeightsError, match="version 1 was overwritten"):
        sender(tmp_path).write(manifest)


def test_a_replaced_learner_deletes_no_new_file(tmp_path: Path, weights: SharedTensors) -> None:
    old = sender(tmp_path / "life_9")
    new = sender(tmp_path / "life_10")
    announced = weights.write(1, TENSORS.values())
    old.write(announced)
    of_new = path_of(new.write(announced))
    assert not (tmp_path / "life_9").exists(), "a killed learner leaves its folder"
    # It still runs, and publishes once more.
    old.write(weights.write(2, TENSORS.values()))
    old.close()
    assert of_new.exists()
    new.close()
    assert list(tmp_path.glob("*")) == []
