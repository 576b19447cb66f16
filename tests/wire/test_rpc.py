"""Facts about requests and replies over ZeroMQ."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from async_rl.core.errors import DeadlineExceeded, ProtocolError, StalenessError
from async_rl.protocol.base import Message
from async_rl.protocol.buffer import RequestWork, Work
from async_rl.protocol.supervisor import GetStatus
from async_rl.wire.rpc import Keys, RpcClient, RpcServer, create_keys, load_keys


def ask(credit: int) -> RequestWork:
    return RequestWork(generator="g", incarnation="i", version=0, credit=credit, wait_s=0)


@asynccontextmanager
async def serving(
    keys: Keys, handler: Callable[[RequestWork], Awaitable[Message]], *, gather_s: float = 0.0
) -> AsyncIterator[RpcServer]:
    handlers = {RequestWork: handler}
    with RpcServer("127.0.0.1", 0, keys, handlers, gather_s=gather_s) as server:
        task = asyncio.create_task(server.serve())
        try:
            yield server
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def client_of(
    keys: Keys, handler: Callable[[RequestWork], Awaitable[Message]], **kinds: float
) -> AsyncIterator[RpcClient]:
    async with serving(keys, handler, **kinds) as server, RpcClient(server.address, keys) as client:
        yield client


async def empty(_: RequestWork) -> Message:
    return Work(tickets=[])


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return create_keys(tmp_path / "keys")


def test_keys_are_readable_by_the_owner_only(tmp_path: Path) -> None:
    made = create_keys(tmp_path / "keys")
    assert (tmp_path / "keys" / "keys.json").stat().st_mode & 0o077 == 0
    assert (tmp_path / "keys").stat().st_mode & 0o077 == 0
    assert load_keys(tmp_path / "keys") == made


async def test_a_call_returns_its_own_reply_also_next_to_one_past_its_deadline(keys: Keys) -> None:
    is_second_answered = asyncio.Event()

    async def slow_first(request: RequestWork) -> Message:
        if request.credit == 0:
            await asyncio.Event().wait()
        if request.credit == 1:
            await is_second_answered.wait()
        is_second_answered.set()
        return Work(tickets=[], waits_for=str(request.credit))

    async with client_of(keys, slow_first) as client:
        with pytest.raises(DeadlineExceeded, match=r"RequestWork within 0\.1 s"):
            await client.call(ask(0), timeout_s=0.1)
        replies = await asyncio.gather(*(client.call(ask(n), timeout_s=5) for n in (1, 2, 3)))
    assert [reply.waits_for for reply in replies] == ["1", "2", "3"]


@pytest.mark.parametrize("gather_s", [0.8, 0.0])
async def test_a_server_that_gathers_reads_requests_of_some_time_together(
    keys: Keys, gather_s: float
) -> None:
    running: list[int] = []
    most = 0

    async def count(request: RequestWork) -> Message:
        nonlocal most
        running.append(request.credit)
        await asyncio.sleep(0)  # the others that were read with it begin
        most = max(most, len(running))
        running.remove(request.credit)
        return Work(tickets=[])

    async with client_of(keys, count, gather_s=gather_s) as client:
        # The first is answered at once; its answer begins the pause.
        await client.call(ask(1), timeout_s=5)
        calls = []
        for number in range(10):
            calls.append(asyncio.create_task(client.call(ask(2 + number), timeout_s=5)))
            await asyncio.sleep(0.01)
        await asyncio.gather(*calls)
    assert (most == 10) == (gather_s > 0)


async def test_a_message_above_the_limit_is_not_read(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_rl.wire.rpc.MAX_MESSAGE_BYTES", 10_000)

    def named(name_bytes: int) -> RequestWork:
        return msgspec.structs.replace(ask(1), generator="g" * name_bytes)

    async with client_of(keys, empty) as client:
        assert (await client.call(named(5_000), timeout_s=5)).tickets == []
        with pytest.raises(DeadlineExceeded):
            await client.call(named(20_000), timeout_s=0.3)


async def test_a_handlers_error_reaches_the_caller_as_the_same_class(keys: Keys) -> None:
    async def fail(_: RequestWork) -> Message:
        raise StalenessError("version 3 is too old")

    async with client_of(keys, fail) as client:
        with pytest.raises(StalenessError, match="version 3 is too old"):
            await client.call(ask(1), timeout_s=5)
        # A message that the server does not know.
        with pytest.raises(ProtocolError, match="GetStatus"):
            await client.call(GetStatus(), timeout_s=5)


async def test_a_client_with_the_keys_of_another_run_gets_no_answer(
    keys: Keys, tmp_path: Path
) -> None:
    other = create_keys(tmp_path / "other")
    # The public key of a server is no secret.
    stolen = msgspec.structs.replace(
        other, server_public=keys.server_public, server_secret="", token=""
    )
    async with serving(keys, empty) as server:
        for wrong in (other, stolen):
            async with RpcClient(server.address, wrong) as client:
                with pytest.raises(DeadlineExceeded):
                    await client.call(ask(1), timeout_s=0.3)


async def test_an_unexpected_exception_in_a_handler_ends_the_server(keys: Keys) -> None:
    async def broken(_: RequestWork) -> Message:
        raise ZeroDivisionError

    with RpcServer("127.0.0.1", 0, keys, {RequestWork: broken}) as server:
        task = asyncio.create_task(server.serve())
        async with RpcClient(server.address, keys) as client:
            call = asyncio.create_task(client.call(ask(1), timeout_s=5))
            await asyncio.wait({task})
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
    with pytest.raises(ExceptionGroup) as caught:
        task.result()
    assert caught.group_contains(ZeroDivisionError)
