"""The last words between the supervisor and a process that leaves: it is asked to finish, and what it held goes back to the buffer.

Used by the fleet, through the supervisor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from async_rl.config import RunConfig
from async_rl.errors import AsyncRLError
from async_rl.messages import Drain, Member, ReleaseGenerator
from async_rl.processes.directory import Directory, Peer
from async_rl.topology import ProcessSpec
from async_rl.wire.rpc import RpcClient


class Leaving:
    """Calls the process that leaves, and the buffer when it has left."""

    def __init__(self, config: RunConfig, directory: Directory, connect: Callable[[str], RpcClient], log: logging.Logger) -> None:
        self._config = config
        self._directory = directory
        self._connect = connect
        self._log = log

    async def ask(self, member: Member) -> bool:
        """Asks a generator to take no more work; False if the process has to be told by signal."""
        if member.role != "generator":
            return False
        request = Drain(grace_s=self._config.supervisor.drain_timeout_s)
        try:
            await self._connect(member.address).call(request, timeout_s=self._config.network.call_timeout_s)
        except AsyncRLError as error:
            self._log.warning("%s could not be asked to leave: %s", member.name, error)
            return False
        return True

    async def release(self, spec: ProcessSpec) -> None:
        """The process is gone: the tickets that it held go back."""
        if spec.role != "generator":
            return
        buffer = Peer("buffer", self._directory, self._connect)
        try:
            await buffer.call(ReleaseGenerator(generator=spec.name, incarnation=""), timeout_s=self._config.network.call_timeout_s)
        except AsyncRLError as error:
            self._log.warning("the tickets of %s go back only after buffer.lease_timeout_s: %s", spec.name, error)
