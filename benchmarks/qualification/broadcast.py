"""Broadcasts of a version to processes that receive it as the workers of generators do."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from async_rl.composition.compose import compose
from async_rl.composition.overrides import with_defaults
from async_rl.core.codec import decode, encode
from async_rl.core.errors import AsyncRLError, BroadcastBroken
from async_rl.core.os import die_with_parent
from async_rl.protocol.supervisor import Member
from async_rl.protocol.weights import Manifest, Seat
from async_rl.weights import receiving
from async_rl.weights.block import SharedTensors
from async_rl.weights.broadcast import Broadcaster
from async_rl.weights.communicator import device_name
from async_rl.weights.media import LearnerSide
from async_rl.weights.membership import Life, Load
from async_rl.weights.receiving import BroadcastReceiver
from async_rl.weights.tensors import tensor_spec

Numbers = dict[str, float]
_HOST = "127.0.0.1"
_PUSH_S = 30.0
# A process first imports torch, which takes half a minute on a busy machine.
_ANSWER_S = 120.0
_VERSIONS = 3
# Enough buckets that a process can be lost between two of them.
_TENSORS, _VALUES_ON_CPU, _VALUES_ON_GPU = 16, 1 << 19, 1 << 25


def over_gloo(scratch: Path, settings: list[str]) -> Numbers:
    """Broadcast between main memories."""
    return asyncio.run(_measure([torch.device("cpu")] * 3, settings))


def over_nccl(scratch: Path, settings: list[str]) -> Numbers:
    """Broadcast between all GPUs: the learner has the first one."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return asyncio.run(_measure(devices, settings))


class _Receiver:
    """One receiving process."""

    def __init__(self, index: int, device: torch.device) -> None:
        context = multiprocessing.get_context("spawn")
        self.life: Life = (f"generator-{index}", index)
        self.device = device_name(device)
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_receive, args=(theirs, str(device)), daemon=True)
        self.process.start()
        theirs.close()

    def member(self) -> Member:
        name, pid = self.life
        return Member(
            name=name,
            role="generator",
            pid=pid,
            address=f"tcp://{_HOST}:1",
            version=0,
            state="",
            waits_for="",
            since_s=0.0,
            counters={},
            devices=[self.device],
        )

    def ask(self, manifest: Manifest, seat: Seat, *, dies: bool) -> None:
        """Let it receive a version, or end in the middle of it."""
        self._pipe.send((encode(manifest), encode(seat), dies))

    def answer(self) -> str:
        """Wait until it has; returns an empty string, or the problem."""
        if not self._pipe.poll(_ANSWER_S):
            return "no answer"
        try:
            return str(self._pipe.recv())
        except EOFError:
            return f"the process exited with {self.process.exitcode}"


def _receive(pipe: Connection, device: str) -> None:
    die_with_parent()
    receiver = BroadcastReceiver(0, torch.device(device))
    pipe.send("")
    while True:
        manifest, seat, dies = pipe.recv()
        try:
            # Leaving the block compares the checksum of all tensors with the manifest.
            with receiver.receive(decode(manifest, Manifest), decode(seat, Seat)) as tensors:
                for number, _ in enumerate(tensors):
                    if dies and number == _TENSORS // 2:
                        os._exit(1)
        except AsyncRLError as error:
            pipe.send(f"{type(error).__name__}: {error}")
        else:
            pipe.send("")


class _Learner:
    def __init__(self, device: torch.device, settings: list[str]) -> None:
        values = _VALUES_ON_CPU if device.type == "cpu" else _VALUES_ON_GPU
        self.tensors = {f"t{index}": torch.randn(values) for index in range(_TENSORS)}
        specs = [tensor_spec(*item) for item in self.tensors.items()]
        self.publisher = SharedTensors(specs, None if device.type == "cpu" else torch.cuda)
        exporter: Any = SimpleNamespace(block=self.publisher)
        # The tensors need several buckets; those of a GPU do so as it is.
        receiving.BUCKET_BYTES["gloo"] = 2 << 20
        given = with_defaults(settings, ["weights.transfer=collective"])
        self.broadcaster = Broadcaster(
            LearnerSide(
                config=compose("grpo_code", given).weights,
                folder="",
                life="qualify",
                host=_HOST,
                device=device,
                exporter=exporter,
                push_s=_PUSH_S,
            )
        )
        self._num_loads = 0

    async def begin(
        self, version: int, receivers: list[_Receiver], doomed: _Receiver | None = None
    ) -> Manifest:
        """Announce a version to these receivers; the doomed one exits during the load."""
        self._num_loads += 1
        manifest = self.publisher.write(version, self.tensors.values())
        lives = frozenset(receiver.life for receiver in receivers)
        load = Load(number=self._num_loads, version=version, members=lives, missing=set())
        self.broadcaster.join(load, [receiver.member() for receiver in receivers])
        for receiver in receivers:
            seat = await self.broadcaster.source(manifest, load, receiver.life)
            receiver.ask(manifest, seat, dies=receiver is doomed)
        return manifest


def _answers(receivers: list[_Receiver]) -> list[str]:
    return [receiver.answer() for receiver in receivers]


async def _measure(devices: list[torch.device], settings: list[str]) -> Numbers:
    learner = _Learner(devices[0], settings)
    receivers = [_Receiver(index, device) for index, device in enumerate(devices[1:])]
    size_bytes = sum(t.numel() * t.element_size() for t in learner.tensors.values())
    # Each says once that it has started: the deadline of a push is for the push.
    problems = [problem for problem in await asyncio.to_thread(_answers, receivers) if problem]
    best = float("inf")
    for count in range(1, len(receivers) + 1):
        for version in range(_VERSIONS):
            manifest = await learner.begin(version, receivers[:count])
            started_s = time.monotonic()
            await learner.broadcaster.send(manifest)
            answers = await asyncio.to_thread(_answers, receivers[:count])
            best = min(best, time.monotonic() - started_s)
            problems += filter(None, answers)
    numbers = {
        "generators": float(len(receivers)),
        "wrong_tensors": float(len(problems)),
        "gb_per_s": size_bytes / best / 1e9,
        "seconds_until_lost_is_noticed": await _lose(learner, receivers),
    }
    learner.broadcaster.close()
    if problems:
        raise RuntimeError("; ".join(problems))
    return numbers


async def _lose(learner: _Learner, receivers: list[_Receiver]) -> float:
    """Lose one receiver during a load; the remaining receivers then get a version without it.

    Returns the seconds until the sender gave up.
    """
    started_s = time.monotonic()
    manifest = await learner.begin(_VERSIONS, receivers, doomed=receivers[-1])
    try:
        await learner.broadcaster.send(manifest)
    except BroadcastBroken:
        noticed_s = time.monotonic() - started_s
    else:
        raise RuntimeError("a broadcast succeeded although one of its members had died")
    survivors = receivers[:-1]
    await asyncio.to_thread(_answers, survivors)
    if survivors:
        manifest = await learner.begin(_VERSIONS + 1, survivors)
        await learner.broadcaster.send(manifest)
        answers = await asyncio.to_thread(_answers, survivors)
        if any(answers):
            raise RuntimeError(f"the survivors did not recover: {'; '.join(answers)}")
    return noticed_s
