"""The learner and the generators of a service, as its front calls them."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.core.errors import DataError, DeadlineExceeded, Unavailable, WeightsError
from async_rl.protocol.base import Message
from async_rl.protocol.generator import FreeSlot, LoadWeights
from async_rl.protocol.membership import DRAINING, Member
from async_rl.protocol.service import Execute, Executed, Sample, Sampled
from async_rl.protocol.weights import Manifest, StoredFile
from async_rl.runtime.context import ProcessContext
from async_rl.weights.membership import Life, life_of
from async_rl.weights.tensors import checksum

_LONGEST_S = 3600.0
"""A request takes minutes at most; a process that hangs is ended by the supervisor before this."""
_log = logging.getLogger(__name__)


class Processes:
    """Calls them across their restarts."""

    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self._directory = context.directory
        self._learners: dict[str, Member] = {}
        """The life of the learner that has each training run."""
        self._busy = collections.Counter[Life]()
        self._broken: set[Life] = set()
        self._slots: dict[str, LoadWeights] = {}
        """The newest weights of each slot."""
        self._loaded: dict[tuple[Life, str], LoadWeights] = {}
        self._loading = collections.defaultdict[tuple[Life, str], asyncio.Lock](asyncio.Lock)

    async def find_learner(self, run_id: str) -> None:
        """Wait for a learner, which then executes the requests of a training run."""
        while (member := self._directory.find("learner")) is None:
            with self._context.activity.waiting("the learner"):
                await self._directory.changed(self._directory.revision)
        self._learners[run_id] = member

    async def execute(self, request: Execute) -> Executed:
        """Let the learner of the run execute a request; Unavailable if it left."""
        executed: Executed = await self._call(self._learners[request.run_id], request)
        return executed

    async def _call(self, member: Member, request: Message) -> Any:
        return await self._context.incarnation_of(member).call(request, timeout_s=_LONGEST_S)

    async def sample(self, request: Sample) -> Sampled:
        """Let the least busy generator draw the sequences, another one if it leaves."""
        while True:
            revision = self._directory.revision
            usable = [
                member
                for member in self._directory.of_role("generator")
                if member.state != DRAINING and life_of(member) not in self._broken
            ]
            if not usable:
                with self._context.activity.waiting("a generator"):
                    await self._directory.changed(revision)
                continue
            member = min(usable, key=lambda member: self._busy[life_of(member)])
            life = life_of(member)
            self._busy[life] += 1
            try:
                if request.policy:
                    await self._load(member, request.policy)
                sampled: Sampled = await self._call(member, request)
            except DeadlineExceeded:
                raise
            except Unavailable as error:
                _log.warning("sample %s moves: %s", request.request_id, error)
                self._broken.add(life)
            else:
                return sampled
            finally:
                self._busy[life] -= 1

    async def load(self, policy: str, directory: Path, version: int) -> None:
        """Put these weights into the slot of a policy on every generator, also on later ones.
        Requests in flight continue with them. Raises DataError if a generator has no free slot or
        refuses them.
        """
        self._slots[policy] = await asyncio.to_thread(_load_of, policy, directory, version)
        for member in self._directory.of_role("generator"):
            try:
                await self._load(member, policy)
            except Unavailable as error:
                if self._directory.find(member.name) == member:
                    raise DataError(f"{member.name}: {error}") from error

    async def unload(self, policy: str) -> None:
        """Free the slot of a policy on every generator. Its samples in flight fail; a later one
        takes a slot again.
        """
        for member in self._directory.of_role("generator"):
            key = life_of(member), policy
            async with self._loading[key]:
                self._loaded.pop(key, None)
                # A generator that has left has no slots.
                with contextlib.suppress(Unavailable):
                    await self._call(member, FreeSlot(policy=policy))

    async def _load(self, member: Member, policy: str) -> None:
        key = life_of(member), policy
        async with self._loading[key]:
            load = self._slots.get(policy)
            if load is None:
                raise DataError(f"{policy} has no weights here; save them for sampling again")
            if self._loaded.get(key) is not load:
                try:
                    await self._call(member, load)
                except WeightsError as error:
                    # It concerns this policy only, and must not end the front.
                    raise DataError(f"{member.name}: {error}") from error
                self._loaded[key] = load


def _load_of(policy: str, directory: Path, version: int) -> LoadWeights:
    file = directory / "adapter_model.safetensors"
    # Nothing names the tensors of the base model, which is the same file everywhere.
    manifest = Manifest(version=version, path="", tensors=[], total_bytes=0, checksum=0)
    if (directory / "model.safetensors").exists():
        whole = StoredFile(url=str(directory))
        return LoadWeights(manifest=manifest, source=whole, policy=policy)
    try:
        described = json.loads((directory / "adapter_config.json").read_bytes())
        content = np.frombuffer(file.read_bytes(), np.uint8)
    except OSError as error:
        raise DataError(f"{directory} has no adapter: {error}") from error
    source = StoredFile(
        url=file.as_uri(),
        scaling=described["lora_alpha"] / described["r"],
        checksum=checksum(content),
    )
    return LoadWeights(manifest=manifest, source=source, policy=policy)
