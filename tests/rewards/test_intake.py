"""Clients without the token that hold connections, and a verifier with few descriptors."""

import itertools
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

FEW = 256
CALL = {"kind": "call", "function": "f", "args": [3], "expected": 9}
BODY = {"code": "def f(x): return x * x", "tests": [CALL]}
POST = b"POST /verify HTTP/1.1\r\nHost: x\r\n"
OPENINGS = [
    b"",
    b"GET /health HT",
    POST + b"X: ",
    POST + b"Content-Length: 999999\r\n\r\n{",
    POST + b"Authorization: Bearer x\r\nContent-Length: 9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """URL of a verifier with few descriptors, and the path of its log."""
    log = tmp_path_factory.mktemp("verifier") / "log"
    command = [sys.executable, "-m", "async_rl.launchers.cli", "verifier", "--token", "t"]

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, FEW))

    with open(log, "wb") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, preexec_fn=few
        )
    assert process.stdout
    yield process.stdout.readline().split()[2], log
    process.terminate()
    process.stdout.read()
    process.stdout.close()
    assert process.wait() == 0


def connected(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def test_clients_without_the_token_keep_nobody_out(server: tuple[str, Path]) -> None:
    url, log = server
    held: list[socket.socket] = []
    try:
        # Of each kind alone more than there are descriptors, then of all kinds.
        for openings in (*([each] for each in OPENINGS), OPENINGS):
            for opening in itertools.islice(itertools.cycle(openings), 300):
                held.append(connected(url))
                held[-1].sendall(opening)
            started = time.monotonic()
            headers = {"Authorization": "Bearer t"}
            answer = httpx.post(f"{url}/verify", json=BODY, headers=headers, timeout=30)
            assert answer.json()["verdict"] == "pass"
            assert time.monotonic() - started < 15
            while held:
                held.pop().close()
    finally:
        for client in held:
            client.close()
    assert len(log.read_bytes().splitlines()) < 200


def test_unknown_connection_may_not_send_without_end(server: tuple[str, Path]) -> None:
    with connected(server[0]) as client:
        client.sendall(POST)
        endless = b"".join(b"X-%d: %s\r\n" % (number, b"x" * 1000) for number in range(20_000))
        with pytest.raises(OSError, match=r"reset|Broken"):
            client.sendall(endless)
