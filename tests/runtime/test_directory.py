"""Reaching whoever serves under a name: across its lives, and without keeping what belonged to
those that ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from async_rl.core.errors import Unavailable
from async_rl.protocol.base import Message
from async_rl.protocol.buffer import RequestWork, Work
from async_rl.protocol.membership import Member, Members
from async_rl.runtime.directory import Connections, Directory, Peer
from async_rl.wire.keys import Keys, create_keys
from async_rl.wire.rpc import RpcServer

ASK = RequestWork(generator="g", incarnation="i", version=0, credit=1, wait_s=0)


class Lives:
    """Lives of one process, one after the other: the directory knows the newest, which answers with
    its pid, or not at all.
    """

    def __init__(self, keys: Keys, stack: AsyncExitStack) -> None:
        self.directory = Directory()
        self.connect = Connections(keys, self.directory)
        self.asked = asyncio.Event()
        self.ports: set[int] = set()
        self._keys, self._stack = keys, stack

    async def begin(self, pid: int, *, answers: bool = True) -> None:
        async def work(_: RequestWork) -> Message:
            self.asked.set()
            if not answers:
                await asyncio.get_running_loop().create_future()
            return Work(tickets=[], waits_for=str(pid))

        address = await self._stack.enter_async_context(
            _serving(RpcServer("127.0.0.1", 0, self._keys, {RequestWork: work}))
        )
        self.ports.add(int(address.rpartition(":")[2]))
        member = Member(
            name="buffer", role="buffer", pid=pid, address=address, state="", since_s=0.0
        )
        self.directory.update(Members(revision=pid, members=[member]))

    async def ask(self) -> str:
        reply: Work = await Peer("buffer", self.connect).call(ASK, timeout_s=30)
        return reply.waits_for


@asynccontextmanager
async def _serving(server: RpcServer) -> AsyncIterator[str]:
    with server:
        task = asyncio.create_task(server.serve())
        yield server.address
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def it(tmp_path: Path) -> AsyncIterator[Lives]:
    async with AsyncExitStack() as stack:
        it = Lives(create_keys(tmp_path / "keys"), stack)
        yield it
        await it.connect.close()


async def test_a_request_that_its_process_did_not_live_to_answer_is_answered_by_its_successor(
    it: Lives,
) -> None:
    await it.begin(1, answers=False)
    asking = asyncio.create_task(it.ask())
    await it.asked.wait()
    await it.begin(2)
    assert await asking == "2"


async def test_a_process_that_does_not_come_is_named_with_the_request_and_the_time(
    it: Lives,
) -> None:
    expected = r"buffer does not serve: RequestWork got no reply within 0\.1 s"
    with pytest.raises(Unavailable, match=expected):
        await Peer("buffer", it.connect).call(ASK, timeout_s=0.1)


async def test_only_the_connection_to_the_living_process_is_kept(it: Lives) -> None:
    for pid in range(1, 6):
        await it.begin(pid)
        assert await it.ask() == str(pid)
        peers = [c.raddr for c in psutil.Process().net_connections("tcp") if c.raddr]
        # One may still be under way to its end.
        assert sum(peer.port in it.ports for peer in peers) <= 4, "two ends of two connections"


async def test_a_connection_with_a_pending_call_stays_open_though_its_process_left_the_list(
    it: Lives,
) -> None:
    """A generator that is to leave is no member any more while it still answers."""
    await it.begin(1, answers=False)
    client = it.connect(it.directory.members[0].address)
    waiting = asyncio.create_task(client.call(ASK, timeout_s=30))
    await it.asked.wait()
    for pid in (2, 3):
        await it.begin(pid)
        assert await it.ask() == str(pid)
    assert not waiting.done()
    waiting.cancel()


async def test_a_request_is_sent_again_where_a_broken_connection_lost_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("async_rl.runtime.directory.AGAIN_S", 0.01)
    num_sent = 0

    class Lossy(Connections):
        def __call__(self, address: str) -> Any:
            return self

        async def call(self, request: Message, *, timeout_s: float) -> Any:
            nonlocal num_sent
            num_sent += 1
            if num_sent < 3:
                await asyncio.get_running_loop().create_future()
            return Work(tickets=[], waits_for="third")

    directory = Directory()
    member = Member(name="buffer", role="buffer", pid=1, address="a", state="", since_s=0.0)
    directory.update(Members(revision=1, members=[member]))
    peer = Peer("buffer", Lossy(cast(Keys, None), directory))
    work: Work = await peer.call(ASK, timeout_s=60)
    assert work.waits_for == "third"
