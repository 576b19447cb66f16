"""A version that went through a file is the version that was published, wherever the file is."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load as load_tensors
from safetensors.torch import load_file

from async_rl.core.errors import BlockUnreachable, ConfigError, WeightsError
from async_rl.protocol.weights import SHARED_BLOCK, Manifest, StoredFile
from async_rl.weights.adapters import Adapter
from async_rl.weights.block import SharedTensors, SharedTensorsReader
from async_rl.weights.files import FileReader, FileSender
from async_rl.weights.media import LearnerSide
from async_rl.weights.tensors import checksum, tensor_spec

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),
    "c": torch.tensor(3.0),
}


def sender(
    folder: str,
    adapter: Adapter | None = None,
    *,
    is_applied: bool = False,
    exporter: Any = None,
) -> FileSender:
    nothing: Any = None
    exporter = exporter or SimpleNamespace(adapter=adapter, block=SimpleNamespace(changes=None))
    return FileSender(
        LearnerSide(
            config=nothing,
            folder=folder,
            life="L",
            host="127.0.0.1",
            device=torch.device("cpu"),
            exporter=exporter,
            push_s=60,
            is_applied=is_applied,
        )
    )


def publisher() -> SharedTensors:
    return SharedTensors([tensor_spec(name, tensor) for name, tensor in TENSORS.items()])


def read(manifest: Manifest) -> dict[str, torch.Tensor]:
    with SharedTensorsReader(manifest) as reader:
        reader.verify()
        return {name: view.clone() for name, view in reader.tensors()}


def num_open() -> int:
    """Descriptors of blocks in this process: two each."""
    fds = [os.readlink(fd.path) for fd in os.scandir("/proc/self/fd") if os.path.exists(fd.path)]
    return sum("async_rl_weights" in fd for fd in fds)


@pytest.mark.parametrize("place", ["folder", "memory"])
def test_a_generator_reads_what_the_learner_wrote(place: str, tmp_path: Path) -> None:
    files = sender(
        f"memory://{tmp_path.name}" if place == "memory" else str(tmp_path / "deep" / "weights")
    )
    with publisher() as weights, closing(FileReader()) as reader:
        blocks = set()
        for version in (1, 2):
            announced = weights.write(version, [tensor + version for tensor in TENSORS.values()])
            found, source = reader.localize(announced, files.write(announced))
            assert source == SHARED_BLOCK
            assert found.path != announced.path
            assert found.version == version
            blocks.add(os.stat(found.path).st_ino)
            assert reader.localize(announced, SHARED_BLOCK) == (announced, SHARED_BLOCK)
            tensors = read(found)
            assert all(torch.equal(tensors[name], TENSORS[name] + version) for name in TENSORS)
        assert len(blocks) == 1, "its memory is used again"
        before = num_open()
        with SharedTensors([tensor_spec("other", torch.ones(9))]) as others:
            announced = others.write(3, [torch.ones(9)])
            found, _ = reader.localize(announced, files.write(announced))
            assert os.stat(found.path).st_ino not in blocks
            assert read(found)["other"].tolist() == [1.0] * 9
            assert num_open() == before + 2, "that of `others`: the earlier one is free"
    assert not Path(found.path).exists(), "its memory is free"
    files.close()


def test_any_reader_of_safetensors_opens_the_file(tmp_path: Path) -> None:
    files = sender(str(tmp_path))
    with publisher() as weights:
        url = files.write(weights.write(7, TENSORS.values())).url
    found = load_file(url.removeprefix("file://"))
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


@pytest.mark.parametrize("is_applied", [True, False])
async def test_only_engines_that_apply_an_adapter_get_its_file_once_for_all_members(
    is_applied: bool, tmp_path: Path
) -> None:
    adapter = Adapter(tensors={"lora_A": torch.ones(2, 3)}, scaling=2.0)
    files = sender(str(tmp_path), adapter, is_applied=is_applied)
    load: Any = None
    with publisher() as weights:
        manifest = weights.write(7, TENSORS.values())
        found = [await files.source(manifest, load, (name, 1)) for name in "ab"]
    assert found[0] == found[1]
    content = Path(found[0].url.removeprefix("file://")).read_bytes()
    assert set(load_tensors(content)) == ({"lora_A"} if is_applied else set(TENSORS))
    assert found[0].scaling == (2.0 if is_applied else None)
    if is_applied:
        assert found[0].checksum == checksum(content)


def test_old_versions_are_deleted_unless_somebody_reads_them(tmp_path: Path) -> None:
    files = sender(str(tmp_path))

    def written(version: int, keep: set[int]) -> list[str]:
        fleet: Any = SimpleNamespace(loading=keep)
        asyncio.run(files.leave(fleet))
        files.write(weights.write(version, TENSORS.values()))
        return sorted(path.name.removesuffix(".safetensors") for path in tmp_path.glob("*"))

    with publisher() as weights:
        written(1, set())
        assert written(2, set()) == ["version_2"]
        assert written(3, {2}) == ["version_2", "version_3"]
    files.close()
    assert list(tmp_path.glob("*")) == []


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda content: content[:-1] + b"\x77", r"checksum of .* announced"),
        (lambda content: content[:-2], "has 2 bytes, 4 were announced"),
    ],
)
def test_a_damaged_file_is_refused(
    tmp_path: Path, damage: Callable[[bytes], bytes], problem: str
) -> None:
    with publisher() as weights, closing(FileReader()) as reader:
        announced = weights.write(1, TENSORS.values())
        stored = sender(str(tmp_path)).write(announced)
        path = Path(stored.url.removeprefix("file://"))
        path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(WeightsError, match=problem):
            reader.fetch(stored, announced)


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    with publisher() as weights, closing(FileReader()) as reader:
        stored = sender(str(tmp_path)).write(weights.write(1, TENSORS.values()))
        with pytest.raises(WeightsError, match="does not have the version 2"):
            reader.fetch(stored, weights.write(2, TENSORS.values()))


def test_a_place_that_cannot_be_written_is_named_with_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        publisher() as weights,
        pytest.raises(
            ConfigError, match=r"cannot be written to .*file/weights.*weights\.transfer\.path"
        ),
    ):
        sender(str(tmp_path / "file" / "weights")).write(weights.write(1, TENSORS.values()))


def test_a_missing_file_names_the_setting(tmp_path: Path) -> None:
    with (
        publisher() as weights,
        closing(FileReader()) as reader,
        pytest.raises(WeightsError, match=r"cannot be read from .*\(weights.transfer.path\)"),
    ):
        reader.fetch(StoredFile(url=str(tmp_path / "none")), weights.write(1, TENSORS.values()))


@pytest.mark.parametrize("name", ["none", "link"])
def test_a_block_of_another_machine_is_unreachable_whatever_its_path_leads_to(
    tmp_path: Path, name: str
) -> None:
    with publisher() as weights:
        manifest = weights.write(1, TENSORS.values())
    (tmp_path / "link").symlink_to("/dev/zero")
    with pytest.raises(BlockUnreachable):
        SharedTensorsReader(replace(manifest, path=str(tmp_path / name)))


def test_a_version_that_is_overwritten_while_it_is_written_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push that has missed its deadline leaves a thread that still reads the block."""
    with publisher() as weights:
        manifest = weights.write(1, TENSORS.values())

        verify = SharedTensorsReader.verify_unchanged

        def late(reader: SharedTensorsReader) -> None:
            weights.write(1, TENSORS.values())
            verify(reader)

        monkeypatch.setattr(SharedTensorsReader, "verify_unchanged", late)
        with pytest.raises(WeightsError, match="version 1 was overwritten"):
            sender(str(tmp_path)).write(manifest)


def test_a_replaced_learner_deletes_no_file_of_its_successor(tmp_path: Path) -> None:
    old = sender(str(tmp_path / "life_9"))
    new = sender(str(tmp_path / "life_10"))
    with publisher() as weights:
        announced = weights.write(1, TENSORS.values())
        old.write(announced)
        of_new = Path(new.write(announced).url.removeprefix("file://"))
        assert not (tmp_path / "life_9").exists(), "a killed learner leaves its folder"
        # It still runs, and publishes once more.
        old.write(weights.write(2, TENSORS.values()))
        old.close()
        assert of_new.exists()
        new.close()
        assert list(tmp_path.glob("*")) == []
