"""Generators that read files get what changed, and have every bit of the learner's weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from test_files import sender
from test_push import MEMBER

from async_rl.core.errors import WeightsError
from async_rl.protocol.generator import LoadReport, LoadWeights
from async_rl.protocol.weights import Manifest, StoredFile
from async_rl.weights.block import SharedTensors, SharedTensorsReader
from async_rl.weights.changes import Comparison, compared, listed
from async_rl.weights.files import FileReader, FileSender
from async_rl.weights.membership import Load, life_of
from async_rl.weights.routes import Route
from async_rl.weights.tensors import layout, tensor_spec

NUM_WORDS = 200_000


class Generator:
    """Reads files as a generator does; `bases` has what each load was asked to build on."""

    def __init__(self, name: str) -> None:
        self.member = replace(MEMBER, name=name)
        self.bases: list[int | None] = []
        self.files = FileReader()
        self.manifest: Manifest | None = None

    async def call(self, request: LoadWeights, *, timeout_s: float) -> LoadReport:
        assert isinstance(request.source, StoredFile)
        difference = request.source.difference
        self.bases.append(None if difference is None else difference.base)
        self.manifest = self.files.fetch(request.source, request.manifest)
        return LoadReport(version=request.manifest.version, pause_s=0.0)

    def has(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether it has these, bit for bit."""
        assert self.manifest is not None
        with SharedTensorsReader(self.manifest) as reader:
            reader.verify()
            views = [view for _, view in reader.tensors()]
            return all(
                torch.equal(view.view(torch.int16), tensor.view(torch.int16))
                for view, tensor in zip(views, tensors, strict=True)
            )


async def push(manifest: Manifest, files: FileSender, *generators: Generator) -> None:
    for generator in generators:
        life = life_of(generator.member)
        load = Load(number=1, version=manifest.version, members=frozenset([life]), missing={life})
        route = Route(generator.member, [files])
        await route.load(manifest, load, generator, handover=0, timeout_s=9, release=list)


def some_weights(seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(300, 7).bfloat16(), torch.randn(5).bfloat16(), torch.randn(64).half()]


def step(tensors: Sequence[torch.Tensor], share: float = 0.02) -> None:
    """Move a share of the weights, at least one."""
    for tensor in tensors:
        chosen = torch.rand(tensor.shape) < share
        chosen.view(-1)[0] = True
        tensor[chosen] = torch.randn(int(chosen.sum())).to(tensor.dtype)


def publisher(tensors: Sequence[torch.Tensor]) -> SharedTensors:
    return SharedTensors([tensor_spec(str(i), tensor) for i, tensor in enumerate(tensors)])


@settings(deadline=None)
@given(
    st.sets(st.integers(0, NUM_WORDS - 1), max_size=200),
    st.sampled_from([[], [0], [254], [32_767], [32_768, 65_536], list(range(50_000, 90_000))]),
    st.integers(1, 5),
)
def test_changes_lead_from_one_tensor_to_the_other(
    some: set[int], others: list[int], pieces: int
) -> None:
    old = torch.arange(NUM_WORDS).to(torch.int16)
    new = old.clone()
    new[[*some, *others]] ^= 0x4001
    with pytest.MonkeyPatch.context() as patch:
        # Positions cross the borders between pieces.
        patch.setattr("async_rl.weights.changes.PIECE", NUM_WORDS // pieces)
        changes = compared(old, new)
    assert changes.shape[1] <= len({*some, *others}) + 7 + 2 * (pieces + 1)
    positions, words = listed(changes, NUM_WORDS)
    old[positions] = words
    assert torch.equal(old, new)


@pytest.mark.parametrize(("num_changed", "is_few"), [(373, True), (374, False)])
def test_where_most_words_changed_all_are_sent(num_changed: int, is_few: bool) -> None:
    # The first and the last word of a tensor are listed in any case.
    tensors = [torch.zeros(1_000, dtype=torch.bfloat16)]
    with publisher(tensors) as weights:
        weights.write(0, tensors)
        tensors[0][1 : 1 + num_changed] = 1
        weights.write(1, tensors, compares=True)
        assert (weights.changes is not None) is is_few


def test_only_what_is_asked_for_is_compared_and_never_the_first_version() -> None:
    tensors = some_weights(0)
    with publisher(tensors) as weights:
        for version, compares in enumerate((True, False, True)):
            weights.write(version, tensors, compares=compares)
            assert (weights.changes is not None) is (version == 2)
        assert weights.changes is not None
        assert weights.changes.difference.base == 1


def test_on_a_gpu_the_old_words_come_on_a_stream_of_their_own_and_the_copy_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    did: list[str] = []

    class Cuda:
        """A torch.cuda whose streams tell what they were asked."""

        def __init__(self, name: str = "") -> None:
            self.name = name

        def Stream(self) -> Cuda:
            return Cuda("side")

        def current_stream(self) -> Cuda:
            return Cuda("present")

        @contextmanager
        def stream(self, stream: Cuda) -> Iterator[None]:
            did.append(f"read on {stream.name}")
            yield

        def wait_stream(self, other: Cuda) -> None:
            did.append(f"{self.name} waits for {other.name}")

    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda _, s: did.append(f"kept for {s.name}"), raising=False
    )
    entries, _ = layout([tensor_spec("w", torch.empty(4, dtype=torch.bfloat16))])
    comparison = Comparison(entries, version=2, base=1, cuda=Cuda())
    old, new = torch.zeros(8, dtype=torch.uint8), torch.ones(8, dtype=torch.uint8)
    new[2:6] = 0
    comparison.add(old, new)
    assert did == ["read on side", "present waits for side", "kept for present"]
    assert comparison.result() is None, "the first and the last of four words are too many"


class Learner:
    """What a sender sees of the learner that publishes these weights."""

    adapter = None

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.block = publisher(tensors)


async def test_after_a_thousand_changes_every_tensor_is_bit_equal(tmp_path: Path) -> None:
    tensors = some_weights(0)
    learner, early = Learner(tensors), Generator("early")
    files = sender(str(tmp_path), exporter=learner)

    with learner.block as weights, closing(early.files):
        for version in range(1_000):
            manifest = weights.write(version, tensors, compares=files.compares)
            await push(manifest, files, early)
            assert early.has(tensors)
            step(tensors)
    assert early.bases == [None, *range(999)]
    files.close()
    assert list(tmp_path.glob("*")) == []


async def test_who_joins_late_or_missed_a_version_gets_all_and_then_changes(
    tmp_path: Path,
) -> None:
    tensors = some_weights(1)
    learner = Learner(tensors)
    files = sender(str(tmp_path), exporter=learner)
    always, late, absent = Generator("always"), Generator("late"), Generator("absent")
    with (
        learner.block as weights,
        closing(always.files),
        closing(late.files),
        closing(absent.files),
    ):
        for present in ([absent], [], [absent, late], [absent, late]):
            manifest = weights.write(len(always.bases), tensors, compares=files.compares)
            await push(manifest, files, always, *present)
            step(tensors)
    assert always.bases == [None, 0, 1, 2]
    assert late.bases == [None, 2]
    assert absent.bases == [None, None, 2]


@pytest.mark.parametrize("fault", ["lost", "damaged"])
async def test_a_broken_chain_heals_without_the_others(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = some_weights(3)
    learner, whole, broken = Learner(tensors), Generator("whole"), Generator("broken")
    files = sender(str(tmp_path), exporter=learner)

    with learner.block as weights, closing(whole.files), closing(broken.files):
        await push(weights.write(0, tensors), files, whole, broken)
        step(tensors)
        manifest = weights.write(1, tensors, compares=True)
        await push(manifest, files, whole)
        if fault == "lost":
            broken.files.close()
            await push(manifest, files, broken)
        else:
            with monkeypatch.context() as patch:
                patch.setattr("async_rl.weights.block.listed", bent)
                await push(manifest, files, broken)
        assert broken.has(tensors)
        step(tensors)
        await push(weights.write(2, tensors, compares=True), files, whole, broken)
        assert whole.has(tensors)
        assert broken.has(tensors)
    assert whole.bases == [None, 0, 1]
    assert broken.bases == [None, 0, None, 1]


def bent(changes: torch.Tensor, num_words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with one wrong bit."""
    positions, words = listed(changes, num_words)
    words[0] ^= 1
    return positions, words


async def test_32_bit_weights_are_sent_whole(tmp_path: Path) -> None:
    tensors: list[Any] = [torch.randn(30)]
    learner, generator = Learner(tensors), Generator("a")
    files = sender(str(tmp_path), exporter=learner)

    with learner.block as weights, closing(generator.files):
        for version in range(2):
            manifest = weights.write(version, tensors, compares=True)
            await push(manifest, files, generator)
    assert generator.bases == [None, None]


@pytest.mark.parametrize("content", [b"", b"no such format", b"\0" * 4_000])
async def test_a_file_without_the_announced_changes_is_refused(
    content: bytes, tmp_path: Path
) -> None:
    tensors = some_weights(4)
    learner = Learner(tensors)
    files = sender(str(tmp_path), exporter=learner)
    life = ("a", 1)
    load = Load(number=1, version=0, members=frozenset([life]), missing={life})
    with learner.block as weights, closing(FileReader()) as reader:
        manifest = weights.write(0, tensors)
        reader.fetch(await files.source(manifest, load, life), manifest)
        manifest = weights.write(1, tensors, compares=True)
        source = await files.source(manifest, load, life)
        assert source.difference is not None
        Path(source.url.removeprefix("file://")).write_bytes(content)
        with pytest.raises(WeightsError, match="does not have the version 1"):
            reader.fetch(source, manifest)


@pytest.mark.parametrize("gaps", [[299], [0, -1]])
def test_changes_that_reach_beyond_a_tensor_are_refused(gaps: list[int]) -> None:
    changes = torch.tensor([gaps, [1] * len(gaps)], dtype=torch.int16)
    with pytest.raises(WeightsError, match="of a tensor of 10 words"):
        listed(changes, 10)
