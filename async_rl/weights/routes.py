"""The way of a version to one generator: which media may carry it, and the call that loads it."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from async_rl.core.errors import BaseMissing, BlockUnreachable, DeadlineExceeded, WeightsError
from async_rl.protocol.generator import LoadReport, LoadWeights
from async_rl.protocol.supervisor import Member
from async_rl.protocol.weights import Manifest, Seat
from async_rl.weights.broadcast import Broadcaster
from async_rl.weights.media import LONGEST_S, Caller, FileSender, LearnerSide, Sender
from async_rl.weights.membership import Load, life_of

_log = logging.getLogger(__name__)

SENDERS: Mapping[str, tuple[type[Sender], ...]] = {
    "shared_memory": (Sender,),
    "filesystem": (FileSender,),
    "collective": (Broadcaster,),
    "auto": (Broadcaster, Sender, FileSender),
}
"""Senders by weights.transfer, preferred first: a member uses the first one that reaches it."""


def open_senders(learner: LearnerSide) -> list[Sender]:
    """Return the senders of the configured transfer, preferred first."""
    # Engines that apply adapters read them from files; no other medium carries an adapter.
    kind = "filesystem" if learner.is_applied else learner.config.transfer.kind
    return [sender(learner) for sender in SENDERS[kind]]


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
        num_readers: int = 1,
        sent: asyncio.Event | None = None,
    ) -> LoadReport:
        """Return once the generator samples with the version.

        timeout_s: of each request, from when it is sent, or from `sent` on: a sender that is slow
        is no fault of the member. num_readers: members that may read the same file at this time.
        release: called once this load no longer reads the learner's block. Raises the error of
        the call, DeadlineExceeded, and WeightsError if the generator loaded another version.
        """
        while True:
            sender = self.sender
            started_s = time.monotonic()
            source = await sender.source(manifest, load, life_of(self.member))
            took_s = time.monotonic() - started_s
            if took_s > timeout_s:
                _log.warning(
                    "version %d took the learner %.0f s to write, and %s waited for it; set"
                    " weights.transfer.path to faster storage",
                    manifest.version,
                    took_s,
                    self.member.name,
                )
            if not sender.reads_block:
                load.reads_block = False
                release()
            sender.took = max(sender.took, (manifest.version, took_s))
            # Reading a file may take as long as writing it, and all readers share the storage.
            more_s = round(sender.took[1] * num_readers)
            request = LoadWeights(manifest=manifest, source=source, handover=handover)
            try:
                report = await _answer(caller, request, timeout_s, more_s, sent)
            except BaseMissing:
                # The same sender, which then offers a source that needs no earlier version.
                continue
            except BlockUnreachable:
                # Unreachable memory does not become reachable in the same life; each try costs a
                # call.
                self._senders.remove(sender)
                if not any(other.reaches(self.member) for other in self._senders):
                    raise
                continue
            if report.version != manifest.version:
                raise WeightsError(
                    f"it loaded version {report.version} instead of {manifest.version}"
                )
            return report


async def _answer(
    caller: Caller,
    request: LoadWeights,
    timeout_s: float,
    more_s: float,
    sent: asyncio.Event | None,
) -> LoadReport:
    """Call a generator, with timeout_s + more_s from now on, or from `sent` on. Raises
    DeadlineExceeded.
    """
    limit_s = timeout_s + more_s
    if isinstance(request.source, Seat):
        limit_s = max(limit_s, 2 * request.source.timeout_s)

    async def begin() -> None:
        if sent is not None:
            await sent.wait()
        limit.reschedule(asyncio.get_running_loop().time() + limit_s)

    beginning = asyncio.create_task(begin(), name="deadline")
    try:
        async with asyncio.timeout(None) as limit:
            report: LoadReport = await caller.call(request, timeout_s=LONGEST_S)
            return report
    except TimeoutError as error:
        slow = f", and {limit_s - timeout_s:g} s for a slow medium" if limit_s > timeout_s else ""
        raise DeadlineExceeded(
            f"version {request.manifest.version} was not loaded within {limit_s:g} s"
            f" (timeouts.start_s / 3{slow})"
        ) from error
    finally:
        beginning.cancel()
