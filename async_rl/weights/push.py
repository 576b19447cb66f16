"""One generator is asked to load one version, in the form that reaches it, and what comes of it.

Called by training/pushing.py, which cuts off those that fail.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from async_rl.core.errors import BlockUnreachable, WeightsError
from async_rl.protocol.generator import LoadReport, LoadWeights, ReceiveWeights
from async_rl.protocol.weights import Manifest, Source


class Caller(Protocol):
    """The part of an RpcClient that a push needs."""

    async def call(self, request: Any, *, timeout_s: float) -> Any:
        """Sends the request; the reply, or an AsyncRLError."""


class Route:
    """The way of the weights to one life of a generator: the shared block where that can be opened,
    else the file.

    transfer: as weights.transfer.  Only an attempt shows whether the block can be opened: addresses
    do not tell who shares memory.
    """

    def __init__(self, transfer: str, file: Callable[[Manifest], Awaitable[str]]) -> None:
        self._file = file
        self._falls_back = transfer == "auto"
        self.by_file = transfer == "filesystem"

    async def load(
        self,
        manifest: Manifest,
        caller: Caller,
        *,
        turn: int = 0,
        timeout_s: float,
        written: Callable[[], None],
    ) -> LoadReport:
        """Returns once the generator writes with the version. written: called when the file is
        there, so that the block is not needed.

        Raises what the call raises, WeightsError if another version was loaded.
        """
        url = ""
        if self.by_file:
            url = await self._file(manifest)
            written()
        try:
            return await _load(
                caller, LoadWeights(manifest=manifest, url=url, turn=turn), timeout_s
            )
        except BlockUnreachable:
            if self.by_file or not self._falls_back:
                raise
            self.by_file = True
            return await self.load(
                manifest, caller, turn=turn, timeout_s=timeout_s, written=written
            )


async def receive(
    manifest: Manifest, source: Source, caller: Caller, *, turn: int = 0, timeout_s: float
) -> LoadReport:
    """Returns once the generator writes with the version from there. Raises as `Route.load`,
    GroupBroken if a broadcast lost others.
    """
    return await _load(
        caller, ReceiveWeights(manifest=manifest, source=source, turn=turn), timeout_s
    )


async def _load(
    caller: Caller, request: LoadWeights | ReceiveWeights, timeout_s: float
) -> LoadReport:
    report: LoadReport = await caller.call(request, timeout_s=timeout_s)
    if report.version != request.manifest.version:
        raise WeightsError(
            f"it loaded version {report.version} instead of {request.manifest.version}"
        )
    return report
