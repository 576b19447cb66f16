"""Clients without the token that hold connections, and a verifier with few descriptors."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

FEW = 256
BODY = {
    "code": "def f(x):\n    return x * x",
    "tests": [{"kind": "call", "function": "f", "args": [3], "expected": 9}],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
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
    yield process.stdout.readline().split()[2], str(log)
    process.terminate()
    process.stdout.read()
    process.stdout.close()
    assert process.wait() == 0


OPENINGS = {
    "silent": b"",
    "half a line": b"GET /health HT",
    "headers without an end": b"POST /verify HTTP/1.1\r\nHost: x\r\nX: ",
    "no token, half a body": (
        b"POST /verify HTTP/1.1\r\nHost: x\r\nContent-Length: 999999\r\n\r\n{"
    ),
    "wrong token": (
        b"POST /verify HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer x\r\nContent-Length: 9\r\n\r\n"
    ),
    "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
}


@pytest.mark.parametrize("opening", OPENINGS)
def test_clients_without_the_token_keep_nobody_out(server: tuple[str, str], opening: str) -> None:
    url, log = server
    host, port = url.removeprefix("http://").split(":")
    held = []
    try:
        for _ in range(400):
            client = socket.create_connection((host, int(port)), timeout=5)
            client.sendall(OPENINGS[opening])
            held.append(client)
        started = time.monotonic()
        for _ in range(5):
            answer = httpx.post(
                f"{url}/verify", json=BODY, headers={"Authorization": "Bearer t"}, timeout=30
            )
            assert answer.json()["verdict"] == "pass"
        assert time.monotonic() - started < 15
    finally:
        for client in held:
            client.close()
    with open(log, "rb") as lines:
        assert len(lines.readlines()) < 200


def test_connection_without_the_token_ends_after_its_answer(server: tuple[str, str]) -> None:
    url, _ = server
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.sendall(OPENINGS["no token, half a body"])
        answer = b""
        while data := client.recv(4096):
            answer += data
    assert answer.startswith(b"HTTP/1.1 401")


def test_unknown_connection_may_not_send_without_end(server: tuple[str, str]) -> None:
    url, _ = server
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.sendall(b"POST /verify HTTP/1.1\r\nHost: x\r\n")
        endless = b"".join(b"X-%d: %s\r\n" % (number, b"x" * 1000) for number in range(20_000))
        with pytest.raises(OSError, match=r"reset|Broken"):
            client.sendall(endless)
