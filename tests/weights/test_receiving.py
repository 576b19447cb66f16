"""What a receiving rank of a broadcast does with the pieces, which a list stands for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from weights_support import CPU, SEAT

from async_rl.core.errors import BroadcastBroken, WeightsError
from async_rl.protocol.weights import SHARED_BLOCK, Manifest, Seat
from async_rl.weights import receiving
from async_rl.weights.block import SharedTensors
from async_rl.weights.changes import listed
from async_rl.weights.outgoing import buckets
from async_rl.weights.routes import Receivers
from async_rl.weights.tensors import tensor_spec


class Sender:
    """Rank 0 sends these bytes, piece by piece."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.num_begun = 0
        self._pieces: list[torch.Tensor] = []

    def sends(self, manifest: Manifest, content: torch.Tensor, bucket_bytes: int) -> None:
        self._pieces = [
            piece.clone()
            for bucket in buckets(manifest, bucket_bytes)
            for piece in torch.split(content[bucket.begin : bucket.end], bucket_bytes)
        ]

    def join(self, seat: Seat, rank: int, device: torch.device) -> Any:
        name = seat.communicator
        self.did.append(f"join {name} as {rank}")
        return SimpleNamespace(device=device, close=lambda: self.did.append(f"leave {name}"))

    def begin(self, _: object, flat: torch.Tensor, sender: int, **__: float) -> Callable[[], Any]:
        self.num_begun += 1
        piece = self._pieces.pop(0)
        return lambda: flat.copy_(piece)


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> Sender:
    sender = Sender()
    monkeypatch.setattr(receiving, "join", sender.join)
    monkeypatch.setattr(receiving, "begin", sender.begin)
    return sender


def block_of(tensors: Sequence[torch.Tensor]) -> SharedTensors:
    return SharedTensors([tensor_spec(f"t{i}", tensor) for i, tensor in enumerate(tensors)])


# A tensor has 2,800 bytes, 2,816 with its padding.
@pytest.mark.parametrize(("bucket_bytes", "num_pieces"), [(6000, 2), (1000, 12), (2816, 4)])
def test_a_whole_version_arrives_in_pieces_and_its_communicator_is_kept(
    bucket_bytes: int, num_pieces: int, sender: Sender
) -> None:
    data = [torch.full((700,), float(i)) for i in range(4)]
    receivers = Receivers(1, CPU)
    with block_of(data) as block:
        manifest = block.write(3, data)
        for name in ("one", "one", "two"):
            sender.sends(manifest, block.content, bucket_bytes)
            sender.num_begun = 0
            seat = replace(SEAT, communicator=name, bucket_bytes=bucket_bytes)
            with receivers.receive(manifest, seat) as tensors:
                first = next(tensors)
                # The next bucket arrives while the engine takes this one.
                assert sender.num_begun == 2 * num_pieces // min(num_pieces, 4)
                # Kept until the end, as an engine may: no later bucket overwrites one.
                found = dict([first, *tensors])
            assert all(torch.equal(found[f"t{i}"], tensor) for i, tensor in enumerate(data))
        with receivers.receive(manifest, SHARED_BLOCK) as tensors:
            assert len(dict(tensors)) == 4
        sender.sends(manifest, block.content.flip(0), bucket_bytes)
        with pytest.raises(WeightsError), receivers.receive(manifest, seat) as tensors:
            assert len(list(tensors)) == 4
    receivers.close()
    assert sender.did == ["join one as 2", "leave one", "join two as 2", "leave two"]


def test_an_engine_that_has_the_version_before_gets_the_changes_and_any_other_gives_up(
    sender: Sender,
) -> None:
    new = [torch.randn(5_000).bfloat16(), torch.randn(300).bfloat16()]
    old = [tensor.clone() for tensor in new]
    receivers = Receivers(0, CPU)
    with block_of(old) as block:

        def received(manifest: Manifest, content: torch.Tensor, seat: Seat) -> Any:
            sent = manifest if seat.difference is None else seat.difference.manifest
            sender.sends(sent, content, seat.bucket_bytes)
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
            positions, words = listed(lists[f"t{number}"], len(tensor))
            tensor.view(torch.int16)[positions] = words
            assert torch.equal(tensor, new[number])
        # It has version 2 now, which is not the one that changed.
        sender.num_begun = 0
        with pytest.raises(BroadcastBroken, match="takes no changes from version 1"):
            received(after, changes.content, seat)
    assert sender.num_begun == 1, "it took part"
    assert sender.did == ["join one as 1", "leave one"]
