"""The shared block of weights, and tensors as bytes."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from weights_support import publisher

from async_rl.core.errors import WeightsError
from async_rl.protocol.weights import TensorEntry
from async_rl.weights.block import SharedTensors, SharedTensorsReader, verify_block
from async_rl.weights.tensors import (
    checksum,
    compared,
    layout,
    listed,
    summed,
    tensor_of,
    tensor_spec,
)

NUM_WORDS = 200_000


def made(seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(3), torch.randint(256, (10, 100), dtype=torch.uint8), torch.randn(7).half()]


def test_a_reader_sees_exactly_what_was_written_and_cannot_change_it() -> None:
    with publisher(made(0)) as writer:
        manifest = writer.write(5, made(1))
        for _ in range(2):
            with SharedTensorsReader(manifest) as reader:
                reader.verify()
                found = [view.clone() for _, view in reader.tensors()]
                reader.content[:] = 9
            assert all(map(torch.equal, found, made(1)))
    entries, total = layout(map(tensor_spec, "ab", [torch.empty(3), torch.empty(250)]))
    assert ([e.offset for e in entries], total) == ([64, 128], 128 + 1024), "cache lines"


def test_a_version_overwritten_during_its_check_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with publisher(made(0)) as writer:
        manifest = writer.write(1, made(1))
        verify_block(manifest)
        verify = SharedTensorsReader.verify

        def late(reader: SharedTensorsReader) -> None:
            verify(reader)
            writer.write(1, made(2))

        monkeypatch.setattr(SharedTensorsReader, "verify", late)
        with pytest.raises(WeightsError, match="was overwritten while it was read"):
            verify_block(manifest)


def test_a_block_that_memory_cannot_hold_is_refused_and_leaves_nothing_open() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(WeightsError, match="cannot share 115292150460684"):
        SharedTensors([tensor_spec("a", torch.empty(1 << 58, device="meta"))])
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_tensor_of_the_wrong_size_is_refused_and_leaves_the_block_incomplete() -> None:
    first, second, third = made(0)
    with publisher(made(0)) as writer:
        manifest = writer.write(1, made(1))
        for _ in range(2):
            with pytest.raises(WeightsError, match="1 has 900 bytes, 1000"):
                writer.write(1, [first, second[:9], third])
            with pytest.raises(WeightsError, match="not a complete version 1"):
                SharedTensorsReader(manifest)


def test_checksum_is_the_sum_of_all_words_modulo_2_to_the_64() -> None:
    content = np.random.default_rng(0).integers(128, 256, 8 * 1001 + 5, dtype=np.uint8).tobytes()
    words = [int.from_bytes(content[8 * i : 8 * i + 8], "little") for i in range(1002)]
    assert checksum(content) == sum(words) % 2**64


def test_sums_of_the_source_are_the_checksum_of_a_block_that_has_the_same_bytes() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3,), (), (5, 7), (1,), (4, 4), (13,)]
    given = [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes]
    # A part of a tensor, as of one expert, that begins within a word.
    given.append(torch.randn(9, generator=generator).to(torch.bfloat16)[1:])
    with publisher(given) as writer:
        added_up = writer.write(1, given)
        sums: list[torch.Tensor] = []
        assert writer.write(2, summed(given, sums), sums).checksum == added_up.checksum
        # A copy that went wrong on its way is found by the reader.
        manifest = writer.write(3, (2 * tensor for tensor in summed(given, sums[:0])), sums)
        with SharedTensorsReader(manifest) as reader, pytest.raises(WeightsError, match="checksum"):
            reader.verify()


def test_nothing_is_left_in_shared_memory_or_open_after_close() -> None:
    gc.collect()
    shm, fds = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    writer = publisher(made(0))
    manifest = writer.write(1, made(1))
    assert Path(manifest.path).stat().st_mode & 0o777 == 0o600, "/proc shows it to other users"
    reader = SharedTensorsReader(manifest)
    reader.close()
    writer.close()
    assert "async_rl_weights" not in Path("/proc/self/maps").read_text()
    assert set(os.listdir("/dev/shm")) == shm
    assert len(os.listdir("/proc/self/fd")) == fds


def test_a_tensor_that_does_not_fit_its_announcement_is_refused() -> None:
    entry = TensorEntry(name="w", dtype="float32", shape=[3], offset=0, size_bytes=8)
    with pytest.raises(WeightsError, match="does not fit 8 bytes"):
        tensor_of(entry, torch.zeros(8, dtype=torch.uint8))


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


@pytest.mark.parametrize("gaps", [[299], [0, -1]])
def test_changes_that_reach_beyond_a_tensor_are_refused(gaps: list[int]) -> None:
    changes = torch.tensor([gaps, [1] * len(gaps)], dtype=torch.int16)
    with pytest.raises(WeightsError, match="of a tensor of 10 words"):
        listed(changes, 10)
