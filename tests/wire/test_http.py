"""The sockets of HTTP servers."""

import asyncio
import socket
from pathlib import Path

import pytest
from starlette.applications import Starlette

from async_rl.wire import http
from async_rl.wire.http import listen, listen_again, serving


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_accepted_connection_sends_each_part_of_an_answer_without_delay(host: str) -> None:
    # An answer is written in parts: headers, verdicts, end. With Nagle's algorithm each part waits
    # until the client has acknowledged the one before, which it delays by 40 ms.
    with (
        listen(host, 0) as listener,
        socket.create_connection(listener.getsockname()[:2]),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_a_process_that_starts_again_has_its_port_unless_another_has_it(tmp_path: Path) -> None:
    file = tmp_path / "port"
    with listen_again("127.0.0.1", file) as first:
        port = first.getsockname()[1]
        with listen_again("127.0.0.1", file) as other:
            other_port = other.getsockname()[1]
            assert other_port != port
    with listen_again("127.0.0.1", file) as successor:
        assert successor.getsockname()[1] == other_port
    # Half of a file that a kill left, and a damaged one.
    for text in ("", "70000", "x"):
        file.write_text(text)
        with listen_again("127.0.0.1", file) as successor:
            assert int(file.read_text()) == successor.getsockname()[1]


@pytest.mark.parametrize("sent", ["", "GET / HTTP/1.1\r\nHost:", "answered"])
def test_headers_that_do_not_come_end_their_connection(
    sent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"

    async def main() -> None:
        with listen("127.0.0.1", 0) as listener:
            async with serving(Starlette(), listener, keep_alive_s=600):
                is_answered = sent == "answered"
                monkeypatch.setattr(http.Connection, "headers_s", 600.0 if is_answered else 0.0)
                reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
                if is_answered:
                    writer.write(whole)
                    assert b"404" in await reader.readuntil(b"\r\n\r\nNot Found")
                    monkeypatch.setattr(http.Connection, "headers_s", 0.0)
                # Of a second request on the same connection half comes.
                writer.write(whole[:20] if is_answered else sent.encode())
                with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                    await reader.readexactly(1)
                writer.close()

    asyncio.run(asyncio.wait_for(main(), 60))
