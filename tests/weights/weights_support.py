"""What the tests of a push share: the learner's side, members, seats and loads."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from composing import compose_unchecked
from msgspec.structs import replace

from async_rl.protocol.supervisor import Member
from async_rl.protocol.weights import Manifest, Seat
from async_rl.weights.block import SharedTensors
from async_rl.weights.media import LearnerSide, Sender
from async_rl.weights.membership import Life, Load
from async_rl.weights.tensors import tensor_spec

CPU = torch.device("cpu")
MANIFEST = Manifest(version=1, path="", tensors=[], total_bytes=0, checksum=0)
MEMBER = Member(
    name="g",
    role="generator",
    pid=1,
    address="tcp://10.0.0.9:1",
    state="",
    since_s=0.0,
    devices=["cpu"],
)
SEAT = Seat(
    communicator="one",
    backend="gloo",
    store="",
    secret="",
    host="127.0.0.1",
    world_size=2,
    first_rank=1,
    bucket_bytes=4096,
    timeout_s=20.0,
)


def member(*devices: str) -> Member:
    return replace(MEMBER, devices=list(devices))


def exporter(**facts: Any) -> Any:
    block = SimpleNamespace(changes=None, content=torch.zeros(0))
    return SimpleNamespace(**{"block": block, "others": [], "adapter": None, **facts})


def learner_side(
    *overrides: str, device: torch.device = CPU, folder: str = "memory://weights", **facts: Any
) -> LearnerSide:
    config = compose_unchecked("grpo_code", overrides)
    return LearnerSide(
        config=config.weights,
        folder=folder,
        life="L",
        host="127.0.0.1",
        device=device,
        push_s=config.timeouts.push_s,
        **{"exporter": exporter(), **facts},
    )


def load(number: int, *lives: Life, version: int = 1) -> Load:
    return Load(number=number, version=version, members=frozenset(lives), missing=set())


async def seats(one: Sender, new: Load, members: Mapping[Life, Member]) -> dict[Life, Any]:
    named = [replace(it, name=name, pid=pid) for (name, pid), it in members.items()]
    one.join(new, named)
    return {life: await one.source(MANIFEST, new, life) for life in members}


async def seat_of(one: Sender, new: Load, *devices: str) -> Any:
    """Start a load of one member and return its seat. devices: one CPU by default."""
    return (await seats(one, new, {("g", 1): member(*devices or ["cpu"])}))["g", 1]


def publisher(tensors: Sequence[torch.Tensor]) -> SharedTensors:
    return SharedTensors([tensor_spec(str(i), tensor) for i, tensor in enumerate(tensors)])
