"""An agent that tries to leave its jail, and posts what it found to its endpoint."""

import ctypes
import json
import os
import pathlib
import signal
import socket
import sys
import urllib.request


def tried(action):
    try:
        return action()
    except OSError as error:
        return type(error).__name__


def reached(port):
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    return "reached"


def stays():
    """Leave a process that outlives the agent and its session."""
    if os.fork():
        return "left"
    os.setsid()
    while True:
        signal.pause()


(home, run_dir, other_port), (secret,) = json.loads(sys.argv[1]), sys.argv[2:]
found = {
    "home": tried(lambda: os.listdir(home)),
    "run": tried(lambda: os.listdir(run_dir)),
    "other port": tried(lambda: reached(other_port)),
    "network": tried(lambda: socket.create_connection(("192.0.2.1", 80), timeout=5)),
    "secret": os.environ.get(secret),
    "session key": [name for name, value in os.environ.items() if "session-" in value],
    "processes": tried(lambda: [p for p in range(1, 9999) if not tried(lambda p=p: os.kill(p, 0))]),
    "system": tried(lambda: pathlib.Path("/usr/x").write_text("x")),
    "agent": tried(lambda: pathlib.Path(__file__).write_text("x")),
    "mount": ctypes.CDLL(None).mount(b"x", b"/tmp", b"tmpfs", 0, None),
    "root": tried(lambda: os.setuid(0) or os.chroot("/tmp")),
    "scratch": tried(lambda: pathlib.Path("x").write_text("mine")),
    "leaves": tried(stays),
}
report = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/report",
    json.dumps(found).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
urllib.request.urlopen(report).read()
sys.exit(int(os.environ.get("LANG", "0") == "fail"))
