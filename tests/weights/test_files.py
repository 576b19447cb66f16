"""A version that went through a file is the version that was published, wherever the file is."""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from weights_support import MEMBER, exporter, learner_side, load, publisher

from async_rl.core.errors import BlockUnreachable, WeightsError
from async_rl.protocol.generator import LoadReport, LoadWeights
from async_rl.protocol.weights import SHARED_BLOCK, Manifest, StoredFile
from async_rl.weights.block import SharedTensors, SharedTensorsReader
from async_rl.weights.lora import Adapter
from async_rl.weights.media import FileSender
from async_rl.weights.membership import life_of
from async_rl.weights.receiving import FileReader
from async_rl.weights.routes import Route
from async_rl.weights.tensors import checksum, listed, tensor_spec

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),
    "c": torch.tensor(3.0),
}


def sender(folder: Path | str, **facts: Any) -> FileSender:
    return FileSender(learner_side(folder=str(folder), **facts))


class Generator:
    """Reads files as a generator does; `bases` has what each load was asked to build on."""

    manifest: Manifest | None = None

    def __init__(self, name: str) -> None:
        self.member = replace(MEMBER, name=name)
        self.bases: list[int | None] = []
        self.files = FileReader()

    async def call(self, request: LoadWeights, *, timeout_s: float) -> LoadReport:
        assert isinstance(request.source, StoredFile)
        difference = request.source.difference
        self.bases.append(None if difference is None else difference.base)
        self.manifest = self.files.fetch(request.source, request.manifest)
        return LoadReport(version=request.manifest.version, pause_s=0.0)

    def has(self, tensors: Sequence[torch.Tensor]) -> bool:
        assert self.manifest is not None
        return all(map(torch.equal, read(self.manifest).values(), tensors))


class Fleet:
    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.tensors = [torch.randn(300, 7).bfloat16(), torch.randn(5).half()]
        self.block = publisher(self.tensors)
        self.files = sender(folder, exporter=exporter(block=self.block))
        self.version = -1

    def write(self) -> Manifest:
        self.version += 1
        return self.block.write(self.version, self.tensors, compares=self.files.compares)

    def step(self) -> None:
        """Move a few of the weights, at least one."""
        for tensor in self.tensors:
            chosen = torch.rand(tensor.shape) < 0.02
            chosen.view(-1)[0] = True
            tensor[chosen] = torch.randn(int(chosen.sum())).to(tensor.dtype)

    async def push(self, manifest: Manifest, *generators: Generator) -> None:
        for generator in generators:
            new = load(1, life_of(generator.member), version=manifest.version)
            route = Route(generator.member, [self.files])
            await route.load(manifest, new, generator, handover=0, timeout_s=9, release=list)


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


def test_a_reader_has_what_was_written(tmp_path: Path, weights: SharedTensors) -> None:
    files = sender(f"memory://{tmp_path.name}")
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


def test_a_block_of_another_machine_is_unreachable(tmp_path: Path, weights: SharedTensors) -> None:
    manifest = weights.write(1, TENSORS.values())
    (tmp_path / "link").symlink_to("/dev/zero")
    with pytest.raises(BlockUnreachable):
        SharedTensorsReader(replace(manifest, path=str(tmp_path / "link")))


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


async def test_who_joins_late_or_missed_a_version_gets_all_and_then_changes(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    always, late, absent = (Generator(name) for name in ("always", "late", "absent"))
    for present in ([absent], [], [absent, late], [absent, late]):
        await fleet.push(fleet.write(), always, *present)
        fleet.step()
    assert always.bases == [None, 0, 1, 2]
    assert late.bases == [None, 2]
    assert absent.bases == [None, None, 2]


@pytest.mark.parametrize("fault", ["lost", "damaged"])
async def test_a_broken_chain_heals_without_the_others(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, whole, broken = Fleet(tmp_path), Generator("whole"), Generator("broken")
    await fleet.push(fleet.write(), whole, broken)
    fleet.step()
    manifest = fleet.write()
    await fleet.push(manifest, whole)
    if fault == "lost":
        broken.files.close()
    with monkeypatch.context() as patch:
        if fault == "damaged":
            patch.setattr("async_rl.weights.block.listed", bent)
        await fleet.push(manifest, broken)
    assert broken.has(fleet.tensors)
    fleet.step()
    await fleet.push(fleet.write(), whole, broken)
    assert whole.has(fleet.tensors)
    assert broken.has(fleet.tensors)
    assert whole.bases == [None, 0, 1]
    assert broken.bases == [None, 0, None, 1]


def bent(changes: torch.Tensor, num_words: int) -> tuple[torch.Tensor, torch.Tensor]:
    positions, words = listed(changes, num_words)
    words[0] += 1
    return positions, words
