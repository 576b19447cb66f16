"""Reaching whoever serves under a name, across its lives, and a supervisor that was paused."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from members import member

from async_rl.core.errors import DeadlineExceeded, RestartNeeded, SupervisorLost, Unavailable
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.buffer import RequestWork, Work
from async_rl.protocol.supervisor import GetStatus, Members
from async_rl.runtime.directory import Connections, Directory, Peer, SupervisorCalls
from async_rl.wire.rpc import Keys, RpcServer, create_keys

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

        server = RpcServer("127.0.0.1", 0, self._keys, {RequestWork: work})
        address = await self._stack.enter_async_context(_serving(server))
        self.ports.add(int(address.rpartition(":")[2]))
        served = member("buffer", pid=pid, address=address)
        self.directory.update(Members(revision=pid, members=[served]))

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


class Paused:
    """A client whose supervisor answers the n-th attempt. It is the clock, too: an attempt takes
    its time limit, also on a busy machine.
    """

    def __init__(self, answers_at: int) -> None:
        self.num_attempts = 0
        self.now_s = 0.0
        self._answers_at = answers_at

    def monotonic(self) -> float:
        return self.now_s

    async def call(self, request: Message, *, timeout_s: float) -> Any:
        self.num_attempts += 1
        if self.num_attempts < self._answers_at:
            self.now_s += timeout_s
            raise DeadlineExceeded("no answer")
        return Ok()


@pytest.mark.parametrize(
    ("answers_at", "patience_s", "wait_s"),
    [(3, 60, 0), pytest.param(2, 1, 4, id="an attempt that may rightly take long")],
)
async def test_a_call_is_repeated_until_the_supervisor_runs_again(
    monkeypatch: pytest.MonkeyPatch, answers_at: int, patience_s: float, wait_s: float
) -> None:
    client = Paused(answers_at)
    monkeypatch.setattr("async_rl.runtime.directory.time", client)
    calls: Any = SupervisorCalls(client, call_s=1, patience_s=patience_s)  # type: ignore[arg-type]
    assert await calls.call(GetStatus(), wait_s=wait_s) == Ok()
    assert client.num_attempts == answers_at


async def test_a_process_gives_up_a_supervisor_that_stays_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client: Any = Paused(10**9)
    monkeypatch.setattr("async_rl.runtime.directory.time", client)
    # A cut network looks the same: a supervisor that still runs starts the process again.
    assert issubclass(SupervisorLost, RestartNeeded)
    with pytest.raises(SupervisorLost, match=r"no answer, for 20 s"):
        await SupervisorCalls(client, call_s=5, patience_s=20).call(GetStatus())
    assert client.num_attempts == 5
