"""Generators that read files get what changed, and have every bit of the learner's weights."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from weights_support import CPU, MEMBER, SEAT, exporter, learner_side, load

from async_rl.core.errors import BroadcastBroken, WeightsError
from async_rl.protocol.generator import LoadReport, LoadWeights
from async_rl.protocol.weights import Manifest, Seat, StoredFile
from async_rl.weights import receiving
from async_rl.weights.block import SharedTensors, SharedTensorsReader
from async_rl.weights.files import FileSender
from async_rl.weights.membership import life_of
from async_rl.weights.receiving import FileReader, Receivers, buckets
from async_rl.weights.routes import Route
from async_rl.weights.tensors import compared, listed, tensor_spec

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


class Fleet:
    """A learner that sends files, and its weights."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.tensors = [torch.randn(300, 7).bfloat16(), torch.randn(5).half()]
        self.block = publisher(self.tensors)
        side = learner_side(folder=str(folder), exporter=exporter(block=self.block))
        self.files = FileSender(side)
        self.version = -1

    def write(self) -> Manifest:
        """Publish what the weights are now."""
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


def publisher(tensors: Sequence[torch.Tensor]) -> SharedTensors:
    return SharedTensors([tensor_spec(str(i), tensor) for i, tensor in enumerate(tensors)])


@settings(max_examples=40, deadline=None)
@given(
    st.sets(st.integers(0, NUM_WORDS - 1), max_size=200),
    st.sampled_from([[], [0], [254], [32_767], [32_768, 65_536], list(range(50_000, 90_000))]),
    st.integers(1, 5),
)
def test_changes_lead_from_old_to_new(some: set[int], others: list[int], pieces: int) -> None:
    old = torch.arange(NUM_WORDS).to(torch.int16)
    new = old.clone()
    new[[*some, *others]] ^= 0x4001
    with pytest.MonkeyPatch.context() as patch:
        # Positions cross the borders between pieces.
        patch.setattr("async_rl.weights.tensors.PIECE", NUM_WORDS // pieces)
        changes = compared(old, new)
    assert changes.shape[1] <= len({*some, *others}) + 7 + 2 * (pieces + 1)
    positions, words = listed(changes, NUM_WORDS)
    old[positions] = words
    assert torch.equal(old, new)


@pytest.mark.parametrize(
    ("dtype", "num_changed", "compares", "is_few"),
    [
        (torch.bfloat16, 373, True, True),
        # The first and the last word of a tensor are listed in any case.
        (torch.bfloat16, 374, True, False),
        (torch.bfloat16, 1, False, False),
        (torch.float32, 1, True, False),
    ],
)
def test_few_changes_of_16_bit_words_are_listed_where_that_is_asked_for(
    dtype: torch.dtype, num_changed: int, compares: bool, is_few: bool
) -> None:
    tensors = [torch.zeros(1_000, dtype=dtype)]
    with publisher(tensors) as weights:
        weights.write(0, tensors, compares=True)
        tensors[0][1 : 1 + num_changed] = 1
        weights.write(1, tensors, compares=compares)
        assert (weights.changes is not None) is is_few


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
    """The same with one wrong word."""
    positions, words = listed(changes, num_words)
    words[0] += 1
    return positions, words


@pytest.mark.parametrize("gaps", [[299], [0, -1]])
def test_changes_that_reach_beyond_a_tensor_are_refused(gaps: list[int]) -> None:
    changes = torch.tensor([gaps, [1] * len(gaps)], dtype=torch.int16)
    with pytest.raises(WeightsError, match="of a tensor of 10 words"):
        listed(changes, 10)


def test_an_engine_with_the_version_before_gets_changes_any_other_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    did: list[str] = []
    pieces: list[torch.Tensor] = []

    def join(seat: Seat, rank: int, device: torch.device) -> Any:
        did.append(f"join as {rank}")
        return SimpleNamespace(device=device, close=lambda: did.append("leave"))

    def begin(_: object, flat: torch.Tensor, sender: int, **__: float) -> Callable[[], Any]:
        piece = pieces.pop(0)
        return lambda: flat.copy_(piece)

    monkeypatch.setattr(receiving, "join", join)
    monkeypatch.setattr(receiving, "begin", begin)
    new = [torch.randn(5_000).bfloat16(), torch.randn(300).bfloat16()]
    old = [tensor.clone() for tensor in new]
    receivers = Receivers(0, CPU)
    with publisher(old) as block:

        def received(manifest: Manifest, content: torch.Tensor, seat: Seat) -> Any:
            sent = manifest if seat.difference is None else seat.difference.manifest
            for bucket in buckets(sent, seat.bucket_bytes):
                pieces.extend(content[bucket.begin : bucket.end].clone().split(seat.bucket_bytes))
            with receivers.receive(manifest, seat, takes_changes=True) as tensors:
                return dict(tensors)

        received(block.write(1, new), block.content, SEAT)
        for tensor in new:
            tensor[7:30] = 1
        after = block.write(2, new, compares=True)
        changes = block.changes
        assert changes is not None
        seat = replace(SEAT, difference=changes.difference)
        lists = received(after, changes.content, seat)
        for number, tensor in enumerate(old):
            positions, words = listed(lists[str(number)], len(tensor))
            tensor.view(torch.int16)[positions] = words
            assert torch.equal(tensor, new[number])
        # It has version 2 now, which is not the one that changed.
        with pytest.raises(BroadcastBroken, match="takes no changes from version 1"):
            received(after, changes.content, seat)
    assert pieces == [], "it took part"
    assert did == ["join as 1", "leave"]
