"""Ask one life of a generator to load one version, through the preferred medium that reaches it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from async_rl.core.errors import BaseMissing, BlockUnreachable, WeightsError
from async_rl.protocol.generator import LoadReport, LoadWeights
from async_rl.protocol.membership import Member
from async_rl.protocol.weights import Manifest
from async_rl.weights.membership import Load, life_of
from async_rl.weights.transport.base import Sender


class Caller(Protocol):
    """The part of an RpcClient that a push needs."""

    async def call(self, request: Any, *, timeout_s: float) -> Any:
        """Send the request and return its reply; raises AsyncRLError."""


class Route:
    """The media that may reach one life, preferred first.

    A medium that turns out to be unreachable is not tried again in this life.
    """

    def __init__(self, member: Member, senders: Sequence[Sender]) -> None:
        self.member = member
        self._senders = list(senders)

    @property
    def sender(self) -> Sender:
        """The medium of the next load. Raises BlockUnreachable if none is left."""
        for sender in self._senders:
            if sender.reaches(self.member):
                return sender
        raise BlockUnreachable(
            f"no medium of weights.transfer reaches {self.member.name}; set weights.transfer=auto"
        )

    async def load(
        self,
        manifest: Manifest,
        load: Load,
        caller: Caller,
        *,
        handover: int,
        timeout_s: float,
        release: Callable[[], None],
    ) -> LoadReport:
        """Return once the generator samples with the version.

        release: called once this member no longer reads the learner's block. Raises what the call
        raises, and WeightsError if the generator loaded another version.
        """
        sender = self.sender
        source = await sender.source(manifest, load, life_of(self.member))
        if not sender.reads_block:
            release()
        request = LoadWeights(manifest=manifest, source=source, handover=handover)
        try:
            report: LoadReport = await caller.call(request, timeout_s=timeout_s)
        except (BlockUnreachable, BaseMissing) as error:
            if isinstance(error, BlockUnreachable):
                # Unreachable memory does not become reachable in the same life; each try costs a
                # call.
                self._senders.remove(sender)
                if not any(other.reaches(self.member) for other in self._senders):
                    raise
            return await self.load(
                manifest,
                load,
                caller,
                handover=handover,
                timeout_s=timeout_s,
                release=release,
            )
        if report.version != manifest.version:
            raise WeightsError(f"it loaded version {report.version} instead of {manifest.version}")
        return report
