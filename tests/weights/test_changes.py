"""Generators that read files get what changed, and have every bit of the learner's weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
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
from async_rl.weights.block import SharedTensors, SharedTensorsReader, tensor_spec, tensor_views
from async_rl.weights.changes import Changes
from async_rl.weights.files import FileReader, FileSender
from async_rl.weights.membership import Load, life_of
from async_rl.weights.routes import Route

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
        self.bases.append(request.source.base)
        self.manifest = self.files.fetch(request.source, request.manifest)
        return LoadReport(version=request.manifest.version, pause_s=0.0)

    def has(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether it has these, bit for bit."""
        assert self.manifest is not None
        with SharedTensorsReader(self.manifest) as reader:
            reader.verify()
            views = [view for _, view in tensor_views(reader)]
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
    st.sampled_from([[], [0], [254], [255], [256], [509, 510, 765], list(range(50_000, 90_000))]),
    st.integers(1, 5),
)
def test_changes_lead_from_one_block_to_the_other(
    some: set[int], others: list[int], pieces: int
) -> None:
    old = np.arange(NUM_WORDS, dtype=np.uint16)
    new = old.copy()
    new[[*some, *others]] ^= 0x8001
    with pytest.MonkeyPatch.context() as patch:
        # Positions cross the borders between pieces.
        patch.setattr("async_rl.weights.changes.PIECE", NUM_WORDS // pieces // 7)
        changes = Changes.between(old, new)
        assert changes is not None
        assert changes.values.size <= len({*some, *others}) + 7 * pieces + 1
        again = Changes.from_bytes(changes.to_bytes())
        again.apply(old)
    assert np.array_equal(old, new)


def test_where_most_words_changed_all_are_sent() -> None:
    old = np.zeros(1_000, np.uint16)
    new = old.copy()
    new[:375] = 1
    assert Changes.between(old, new) is not None
    new[375] = 1
    assert Changes.between(old, new) is None


async def test_after_a_thousand_changes_every_tensor_is_bit_equal(tmp_path: Path) -> None:
    tensors = some_weights(0)
    files, early = sender(str(tmp_path)), Generator("early")

    with publisher(tensors) as weights, closing(early.files):
        for version in range(1_000):
            manifest = weights.write(version, tensors)
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
    files = sender(str(tmp_path))
    always, late, absent = Generator("always"), Generator("late"), Generator("absent")
    with (
        publisher(tensors) as weights,
        closing(always.files),
        closing(late.files),
        closing(absent.files),
    ):
        for present in ([absent], [], [absent, late], [absent, late]):
            manifest = weights.write(len(always.bases), tensors)
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
    files, whole, broken = sender(str(tmp_path)), Generator("whole"), Generator("broken")

    with publisher(tensors) as weights, closing(whole.files), closing(broken.files):
        await push(weights.write(0, tensors), files, whole, broken)
        step(tensors)
        manifest = weights.write(1, tensors)
        await push(manifest, files, whole)
        if fault == "lost":
            broken.files.close()
            await push(manifest, files, broken)
        else:
            with monkeypatch.context() as patch:
                read = Changes.from_bytes.__func__
                patch.setattr(Changes, "from_bytes", classmethod(lambda c, b: bent(read(c, b))))
                await push(manifest, files, broken)
        assert broken.has(tensors)
        step(tensors)
        await push(weights.write(2, tensors), files, whole, broken)
        assert whole.has(tensors)
        assert broken.has(tensors)
    assert whole.bases == [None, 0, 1]
    assert broken.bases == [None, 0, None, 1]


def bent(changes: Changes) -> Changes:
    """The same with one wrong bit."""
    values = changes.values.copy()
    values[0] ^= 1
    return Changes(gaps=changes.gaps, values=values)


async def test_32_bit_weights_are_sent_whole(tmp_path: Path) -> None:
    tensors: list[Any] = [torch.randn(30)]
    files, generator = sender(str(tmp_path)), Generator("a")

    with publisher(tensors) as weights, closing(generator.files):
        for version in range(2):
            await push(weights.write(version, tensors), files, generator)
    assert generator.bases == [None, None]


@pytest.mark.parametrize("content", [b"", b"no such format", b"\0" * 100])
def test_bytes_that_are_no_changes_are_refused(content: bytes) -> None:
    with pytest.raises(WeightsError, match="not changes of weights"):
        Changes.from_bytes(content)


def test_changes_that_reach_beyond_the_block_are_refused() -> None:
    changes = Changes.between(np.zeros(300, np.uint16), np.eye(1, 300, 299, np.uint16)[0])
    assert changes is not None
    with pytest.raises(WeightsError, match="word 299 of a block of 10"):
        changes.apply(np.zeros(10, np.uint16))
