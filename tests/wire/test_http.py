"""The sockets of HTTP servers."""

from __future__ import annotations

import socket

import pytest

from async_rl.wire.http import listen


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
