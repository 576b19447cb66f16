import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from sandbox_support import values
from tables import table

from async_rl.core.os import owner_only
from async_rl.sandbox import cells as cells_module
from async_rl.sandbox.cell import Cell, CellFailed
from async_rl.sandbox.cells import Cells, Unsafe
from async_rl.sandbox.protocol import LANDLOCK, NAMESPACES, NOTHING

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("cells_script.py")
SYSTEM_PYTHON = Path("/usr/bin/python3.11")
OWN = [sys.executable, str(SCRIPT), str(ROOT)]


def _check(said: dict[str, Any], level: int) -> None:
    if said["level"] != level:
        pytest.skip(f"this machine has no level {level}: {said['reasons']}")
    assert said["square"] == "9"
    for name in ("passwd", "socket", "write"):
        assert "Error" in said[name]
    assert said["fork"] == said["signal"] == '"PermissionError: [Errno 1] Operation not permitted"'
    assert said["loop"] == 3
    assert said["memory"] == "0"
    assert said["import"] == "1"
    assert said["replaced"] == 0


def _said(command: list[str], **options: Any) -> dict[str, Any]:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
        **options,
    )  # fmt: skip
    if "no jail works" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.fixture
def ordinary() -> Iterator[list[str]]:
    """The script as an ordinary user: root first becomes `nobody`, with the system's Python.

    That user can read only a copy of the package.
    """
    if os.geteuid() != 0:
        yield OWN
        return
    if shutil.which("setpriv") is None or not SYSTEM_PYTHON.exists():
        pytest.skip("no setpriv or no system Python 3.11 to become another user with")
    place = Path("/var/tmp") / f"async_rl-jail-{os.getpid()}"
    shutil.copytree(
        ROOT / "sandbox", place / "sandbox", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(SCRIPT, place)
    try:
        for path in (place, *place.rglob("*")):
            path.chmod(0o755)
        become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"]
        yield [*become, str(SYSTEM_PYTHON), "-B", str(place / SCRIPT.name), str(place)]
    finally:
        shutil.rmtree(place)


@pytest.mark.parametrize("level", [NAMESPACES, LANDLOCK])
def test_ordinary_user_gets_the_same_jail(level: int, ordinary: list[str]) -> None:
    said = _said([*ordinary, str(level)], cwd="/")
    assert said["uid"] != 0
    _check(said, level)


@pytest.mark.parametrize("level", [NAMESPACES, LANDLOCK])
def test_cells_die_with_a_server_that_is_killed(level: int) -> None:
    with subprocess.Popen(
        [*OWN, str(level), "stay"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout
        said = json.loads(server.stdout.readline())
        cells = [psutil.Process(pid) for pid in said["pids"]]
        family = [each for cell in cells for each in (cell, *cell.children(recursive=True))]
        server.send_signal(signal.SIGKILL)
        server.wait()
    assert psutil.wait_procs(family, timeout=10)[1] == []
    _check(said, level)


def test_closing_a_pool_leaves_no_mount_and_no_process_to_init() -> None:
    # The collector collects orphans, as the init of a machine does.
    mounts = Path("/proc/self/mounts").read_text()
    before = set(psutil.Process().children(recursive=True))
    _said([sys.executable, "-c", table(__file__, "collector"), *OWN, str(NAMESPACES)])
    assert set(psutil.Process().children(recursive=True)) == before
    assert Path("/proc/self/mounts").read_text() == mounts


SQUARE = "def f(x): return x * x"


def test_machine_without_a_jail_is_refused_with_the_reasons_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = Cell.start

    async def refuse(level: int, readable: list[str], packages: dict[str, str]) -> Cell:
        if level < NOTHING:
            raise CellFailed(f"level {level} is forbidden here")
        return await start(level, readable, packages)

    monkeypatch.setattr(cells_module.Cell, "start", refuse)
    said = r"level 1 is forbidden here; level 2 is forbidden here.*sandbox\.allow_unsafe=true"
    with pytest.raises(Unsafe, match=said):
        asyncio.run(Cells.start(1))
    assert values(Cells.start(1, allow_unsafe=True), SQUARE, [3]) == (NOTHING, [9])


def test_the_jail_is_as_strong_in_a_run_which_writes_for_its_owner_only() -> None:
    before = values(Cells.start(1), SQUARE, [3])
    with owner_only():
        assert values(Cells.start(1), SQUARE, [3]) == before


def test_cell_that_cannot_start_says_why() -> None:
    with pytest.raises(CellFailed, match="at level 3 did not start: ModuleNotFoundError"):
        asyncio.run(Cell.start(NOTHING, [], {"no_such_package": "/"}))
    said = r"'no_such_package' \(sandbox\.packages\) is not installed"
    with pytest.raises(CellFailed, match=said):
        Cells.of_programs(1, 1, ["no_such_package"])


@pytest.mark.parametrize("level", [NAMESPACES, LANDLOCK])
def test_a_cell_with_numpy_computes_and_shows_nothing_beside_it(level: int) -> None:
    async def start() -> Cells:
        return Cells.of_programs(1, level, ["numpy"])

    found = values(start(), table(__file__, "linear"), [3])
    assert found == (level, [[435, [4.0, 0.0, 0.0, 0.0], 3.0, [1, 2]]])
    _, (beside,) = values(start(), table(__file__, "beside"), [3])
    assert set(beside) <= {"numpy", "numpy.libs"}
    _, (said,) = values(start(), "import msgspec\ndef f(x): return 1", [3])
    assert said.startswith(("ModuleNotFoundError", "PermissionError"))
