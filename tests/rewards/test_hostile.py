import contextlib
import os
import resource
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from rewards_support import Jail

from async_rl.core.types import CallTest, StdinTest, Verdict
from async_rl.sandbox.protocol import NAMESPACES

ROWS = yaml.safe_load(Path(__file__).with_name("hostile_programs.yaml").read_text())
CASES = [
    pytest.param(row, id=f"{family}: {row['name']}")
    for family, rows in {**ROWS["hostile"], "honest": ROWS["honest"]}.items()
    for row in rows
]
SEES_NOTHING = "import os\ndef f(x):\n    return os.listdir('.') or 9"
# Names in /dev/shm of vLLM, multiprocessing, another host, buffers and worlds: tests that run at
# the same time.
OTHERS = ("vllm_dist_", "sem.mp-", "async-rl-canary-", "world_", "buffer-")


def in_shared_memory() -> set[str]:
    """The names that a program can have made."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(OTHERS)}


class Host:
    """A file to spoil, a process to kill, and everything else about the host that a program must
    leave as it is.
    """

    def __init__(self, directory: Path) -> None:
        self._canary = directory / "canary"
        self._canary.write_text("expected: 9")
        self._shared = Path(f"/dev/shm/async-rl-canary-{os.getpid()}-{id(self)}")
        self._shared.touch()
        self._victim = subprocess.Popen(["/bin/sleep", "3600"])

    @contextlib.contextmanager
    def unchanged(self, name: str) -> Iterator[None]:
        """Raise AssertionError if the block changes the host for good. Other tests that run at the
        same time may have a file in /dev/shm for some seconds, or delete one.
        """
        before, files = self._state(), in_shared_memory()
        yield
        deadline_s = time.monotonic() + 5
        while (after := (self._state(), in_shared_memory() - files)) != (before, set()):
            assert time.monotonic() < deadline_s, (name, before, after)
            time.sleep(0.1)

    def _state(self) -> dict[str, object]:
        return {
            "canary": (self._canary.read_text(), self._canary.stat().st_mtime_ns),
            "victim": self._victim.poll(),
            "mounts": Path("/proc/self/mounts").read_text(),
            "host name": socket.gethostname(),
            "shared memory": self._shared.exists(),
            "interpreter": Path(os.__file__).stat().st_mtime_ns,
            "limits": [resource.getrlimit(which) for which in range(16)],
            "environment": dict(os.environ),
            "children": len(psutil.Process().children()),
        }

    def close(self) -> None:
        """End the victim."""
        self._shared.unlink(missing_ok=True)
        self._victim.kill()
        self._victim.wait()


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    made = Host(tmp_path_factory.mktemp("host"))
    yield made
    made.close()


@pytest.mark.parametrize("case", CASES)
def test_program_gets_its_right_verdict_and_harms_nothing(
    each_jail: Jail, host: Host, case: dict[str, Any]
) -> None:
    has_namespaces = each_jail.cells.level == NAMESPACES
    if case["name"] == "scratch file" and not has_namespaces:
        pytest.skip("the scratch needs namespaces")
    call = CallTest(function="f", args=[3], expected=9)
    test = StdinTest(input="3\n", output="9") if case.get("is_stdin") else call
    right = case.get("right", "pass")
    with host.unchanged(case["name"]):
        verdict = each_jail.result(case["code"], test).verdict
        assert verdict in ([right] if isinstance(right, str) else right), verdict
    assert each_jail.cells.num_replaced == 0
    # An honest program passes in the cell, and nothing that the hostile one wrote is left.
    if has_namespaces:
        after = each_jail.result(SEES_NOTHING, call)
        assert after.verdict is Verdict.PASS, after
