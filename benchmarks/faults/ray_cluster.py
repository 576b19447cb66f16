"""A Ray cluster whose nodes have addresses of their own: each in a network namespace of this
machine, joined by a bridge.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

_RAY = str(Path(sys.executable).with_name("ray"))
_PORT = 6379
_READY_S = 90.0
_STORE_BYTES = 80_000_000  # the least that Ray takes; several nodes share this machine's memory


def missing() -> list[str]:
    """Return the requirements that this machine lacks; empty if none."""
    if os.geteuid() != 0:
        return ["root"]
    if shutil.which("ip") is None:
        return ["ip"]
    name = f"arl-try-{os.getpid() % 10_000}"
    made, _ = (
        subprocess.run(["ip", "netns", word, name], capture_output=True, check=False)
        for word in ("add", "del")
    )
    return ["the right to make network namespaces"] if made.returncode else []


class RayCluster:
    """As a context manager; nodes are numbered from 1, the head, and have the address
    `address_of(number)`.
    """

    def __init__(self) -> None:
        self._id = os.getpid() % 10_000
        self._subnet = f"10.{100 + os.getpid() % 100}.{os.getpid() // 100 % 200}"
        self._bridge = f"arl{self._id}br"
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._directory = Path(
            tempfile.mkdtemp(prefix="arl-ray-", dir="/tmp")
        )  # short: Ray puts socket paths below it
        scratch = self._directory / "tmp"
        scratch.mkdir()
        self.env = {"TMPDIR": str(scratch)} | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    @property
    def head(self) -> str:
        """The value of launcher.address."""
        return f"{self.address_of(1)}:{_PORT}"

    def address_of(self, node: int) -> str:
        """The node's address."""
        return f"{self._subnet}.{node}"

    def inside(self, node: int) -> list[str]:
        """What goes before a command that is to run on the node."""
        return ["ip", "netns", "exec", self._namespace(node)]

    def __enter__(self) -> Self:
        # With an address of its own: a bridge else has the lowest one of its ports, so it would
        # change with a node, and the others would send to the old one for seconds.
        address = f"02:00:00:00:{self._id // 100:02d}:{self._id % 100:02d}"
        _ip("link", "add", self._bridge, "address", address, "type", "bridge")
        _ip("addr", "add", f"{self._subnet}.254/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        return self

    def add_node(self, node: int, *, cpus: int, generators: int) -> None:
        """Starts a node that offers so many CPUs, and room for so many generators; returns once it
        has joined.
        """
        namespace, link = self._namespace(node), self._link(node)
        _ip("netns", "add", namespace)
        self._nodes[node] = None  # type: ignore[assignment]
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("link", "set", link, "master", self._bridge, "up")
        _ip("-n", namespace, "addr", "add", f"{self.address_of(node)}/24", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")
        _ip("-n", namespace, "link", "set", "lo", "up")
        command = [
            *self.inside(node),
            _RAY,
            "start",
            f"--node-ip-address={self.address_of(node)}",
            f"--num-cpus={cpus}",
            "--block",
        ]
        command += [
            f"--object-store-memory={_STORE_BYTES}",
            f'--resources={{"generator": {generators}}}',
            "--disable-usage-stats",
        ]
        own = [
            "--head",
            f"--port={_PORT}",
            "--include-dashboard=false",
            f"--temp-dir={self._directory}",
        ]
        command += own if node == 1 else [f"--address={self.head}"]
        output = self._directory / f"node-{node}.txt"
        with output.open("wb") as sink:
            self._nodes[node] = subprocess.Popen(
                command,
                env={**os.environ, **self.env},
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
        deadline_s = time.monotonic() + _READY_S
        while "Ray runtime started" not in output.read_text(errors="replace"):
            assert self._nodes[node].poll() is None, output.read_text(errors="replace")
            assert time.monotonic() < deadline_s, (
                f"node {node} did not start:\n{output.read_text(errors='replace')}"
            )
            time.sleep(0.2)
        if node == 1:
            _until_answered(self.address_of(1), _PORT)

    def cut(self, node: int, *, is_cut: bool) -> None:
        """Take the node off the network, or put it back."""
        _ip("link", "set", self._link(node), "down" if is_cut else "up")

    def slow(self, node: int, mbit: float) -> None:
        """Limit what the node receives to this rate, by a token bucket; 0 = no limit."""
        link = ["dev", self._link(node), "root"]
        if mbit:
            limit = ["rate", f"{mbit:g}mbit", "burst", "64kb", "latency", "400ms"]
            _tc("qdisc", "replace", *link, "tbf", *limit)
        else:
            _tc("qdisc", "del", *link)

    def signal(self, node: int, number: signal.Signals) -> None:
        """Send a signal to everything that runs on the node."""
        for pid in self._pids(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def has_joined(self, node: int) -> bool:
        """Tell whether Ray still runs on the node: it ends where the head has given it up."""
        process = self._nodes[node]
        return process is not None and process.poll() is None

    def _pids(self, node: int) -> list[int]:
        command = ["ip", "netns", "pids", self._namespace(node)]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        return [int(pid) for pid in said.split()]

    def kill_node(self, node: int) -> None:
        """The machine goes down: everything that runs in its namespace, at once."""
        for _ in range(20):  # what is killed may have started something meanwhile
            if not self._pids(node):
                break
            self.signal(node, signal.SIGKILL)
            time.sleep(0.1)
        if (process := self._nodes.pop(node)) is not None:
            process.wait(10)
        _ip("netns", "del", self._namespace(node))

    def __exit__(self, *_: object) -> None:
        for node in sorted(self._nodes, reverse=True):
            self.kill_node(node)
        _ip("link", "del", self._bridge)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _namespace(self, node: int) -> str:
        return f"arl{self._id}n{node}"

    def _link(self, node: int) -> str:
        return f"arl{self._id}v{node}"


def _until_answered(host: str, port: int) -> None:
    deadline_s = time.monotonic() + _READY_S
    while True:
        try:
            socket.create_connection((host, port), timeout=2).close()
            return
        except OSError:
            assert time.monotonic() < deadline_s, f"nobody answers at {host}:{port}"
            time.sleep(0.2)


def _ip(*arguments: str) -> None:
    _command("ip", *arguments)


def _tc(*arguments: str) -> None:
    _command("tc", *arguments)


def _command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
