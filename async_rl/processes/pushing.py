"""Keeps every generator on the newest published weights: pushes new versions to all, the current one to late joiners.

The shared block holds one version. `publish` overwrites it only while nobody reads it: a push still under way makes the learner wait.
A generator that misses the deadline is cut off (the supervisor starts it again) and gets the weights when it is back; the others go on.
"""

from __future__ import annotations

import asyncio
import time

import numpy as np

from async_rl.errors import AsyncRLError, InfrastructureError, WeightsError
from async_rl.messages import Expel, Logprobs, Manifest, Member, Probe
from async_rl.processes.ranks import TrainingPool
from async_rl.processes.runtime import ProcessContext
from async_rl.types import FloatArray, IntArray
from async_rl.weights.push import push

_PROBE_ROWS = 4
_PROBE_TOKENS = 16
_CAUSES = (
    "likely causes: different dtypes (model.dtype), a model that the engine implements differently, a head or an adapter that the push "
    "does not refresh, or weights.probe_tolerance below the dtype's precision"
)


class Pusher:
    """Rank 0's side of the weights."""

    def __init__(self, context: ProcessContext, ranks: TrainingPool) -> None:
        self._context = context
        self._config = context.config.weights
        self._ranks = ranks
        self._block = asyncio.Lock()
        self._manifest: Manifest | None = None
        self._wake = asyncio.Event()
        self._holds: dict[str, tuple[int, int]] = {}  # name -> (pid, version)
        self._landed = asyncio.Condition()
        self._num_pushes = 0
        self._rows: list[IntArray] = []
        self._expected: list[FloatArray] = []
        self._metrics: dict[str, float] = {}

    async def publish(self, version: int) -> None:
        """Writes the weights into the block as soon as nobody reads it, and starts the push."""
        async with self._block:
            self._manifest = await self._ranks.publish(version)
            if self._is_probe_due():
                self._rows = self._rows or probe_rows(self._vocabulary())
                self._expected = await self._ranks.logprobs(self._rows)
            else:
                self._expected = []
        self._wake.set()

    async def live(self, version: int) -> None:
        """Returns once at least one generator serves and all that serve hold `version` or a later one."""
        async with self._landed:
            await self._landed.wait_for(lambda: self._all_hold(version))

    async def run(self) -> None:
        """Pushes until cancelled. Raises WeightsError if a probe shows that a generator does not compute what the learner does."""
        directory = self._context.directory
        while True:
            epoch = directory.epoch
            self._wake.clear()
            if self._manifest is not None:
                await self._push_to(self._behind())
            async with self._landed:
                self._landed.notify_all()
            waits = {
                asyncio.create_task(directory.changed(epoch), name="directory changed"),
                asyncio.create_task(self._wake.wait(), name="version published"),
            }
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    async def _push_to(self, members: list[Member]) -> None:
        if not members or self._manifest is None:
            return
        async with self._block:
            manifest = self._manifest
            started_s = time.monotonic()
            callers = {m.name: self._context.incarnation_of(m) for m in members}
            result = await push(manifest, callers, deadline_s=self._config.deadline_s)
            self._metrics |= {
                "weights/push_s": time.monotonic() - started_s,
                "weights/pause_s": max((r.pause_s for r in result.reports.values()), default=0.0),
            }
            self._num_pushes += 1
            for member in members:
                if member.name in result.failures:
                    await self._cut_off(member, result.failures[member.name])
                else:
                    self._holds[member.name] = (member.pid, manifest.version)
            if self._expected:
                await self._check([m for m in members if m.name in result.reports], manifest.version)

    async def _check(self, members: list[Member], version: int) -> None:
        """Compares the generators' log-probs of the probe rows with the learner's."""
        for member in members:
            client = self._context.incarnation_of(member)
            try:
                reply: Logprobs = await client.call(Probe(rows=self._rows), timeout_s=self._config.deadline_s)
            except InfrastructureError as error:
                await self._cut_off(member, f"did not answer the probe: {error}")
                continue
            if reply.version != version:
                continue
            worst = float(np.abs(np.concatenate(reply.rows) - np.concatenate(self._expected)).max())  # max() would pass over a NaN
            self._metrics["weights/probe_abs_max"] = max(worst, self._metrics.get("weights/probe_abs_max", 0.0))
            if not worst <= self._config.probe_tolerance:
                raise WeightsError(
                    f"{member.name} and the learner disagree by {worst:.3g} nats on version {version} "
                    f"(weights.probe_tolerance={self._config.probe_tolerance:g}); {_CAUSES}"
                )

    async def _cut_off(self, member: Member, reason: str) -> None:
        self._holds.pop(member.name, None)
        self._context.activity.count("failures/generator_cut_off", 1)
        request = Expel(name=member.name, pid=member.pid, reason=reason)
        try:
            await self._context.supervisor.call(request, timeout_s=self._context.config.network.call_timeout_s)
        except AsyncRLError as error:
            raise WeightsError(f"{member.name} missed a push ({reason}) and could not be cut off: {error}") from error

    def _behind(self) -> list[Member]:
        version = self._manifest.version if self._manifest is not None else -1
        return [m for m in self._context.directory.of_role("generator") if self._holds.get(m.name) != (m.pid, version)]

    def _all_hold(self, version: int) -> bool:
        members = self._context.directory.of_role("generator")
        held = [self._holds.get(m.name, (0, -1)) for m in members]
        return bool(members) and all(pid == m.pid and v >= version for m, (pid, v) in zip(members, held, strict=True))

    def _is_probe_due(self) -> bool:
        every = self._config.probe_every_pushes
        return self._num_pushes == 0 or (every > 0 and self._num_pushes % every == 0)

    def _vocabulary(self) -> int:
        if self._manifest is None:
            raise WeightsError("nothing is published yet")
        return next(int(t.shape[0]) for t in self._manifest.tensors if "embed" in t.name)

    def metrics(self) -> dict[str, float]:
        """Figures of the newest push."""
        return dict(self._metrics)


def probe_rows(vocabulary: int) -> list[IntArray]:
    """A few rows of token ids spread over the vocabulary, the same in every run: int32 [16] each."""
    generator = np.random.default_rng(0)
    return [generator.integers(0, vocabulary, _PROBE_TOKENS, dtype=np.int32) for _ in range(_PROBE_ROWS)]
