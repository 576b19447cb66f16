"""Runs every hostile and honest program: `python tests/rewards/corpus_table.py` prints a table by
family, level and user.

`corpus_table.py LEVEL` runs them at one level as the present user and prints what happened as JSON;
a host that changed ends it. `corpus_table.py LEVEL few` runs one program of each family.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import psutil
import yaml
from rewards_support import Jail

from async_rl.core.types import CallTest, StdinTest, Verdict
from async_rl.sandbox.protocol import NAMESPACES

ROOT = Path(__file__).parents[2]
SYSTEM_PYTHON = Path("/usr/bin/python3.11")
OTHER = 65534
LEVELS = {1: "namespaces", 2: "landlock"}
# Names in /dev/shm of vLLM, multiprocessing, another host, buffers and worlds: tests that run at
# the same time.
_OTHERS = ("vllm_dist_", "sem.mp-", "async-rl-canary-", "world_", "buffer-")


@dataclass(frozen=True)
class Case:
    name: str
    family: str
    code: str
    right: tuple[Verdict, ...]
    is_stdin: bool

    def works_at(self, level: int) -> bool:
        """Return whether an honest program of this kind can work: a scratch needs namespaces."""
        return self.name != "scratch file" or level == NAMESPACES


def _case(family: str, row: dict[str, Any]) -> Case:
    right = row.get("right", "pass")
    return Case(
        name=row["name"],
        family=family,
        code=row["code"],
        right=tuple(map(Verdict, [right] if isinstance(right, str) else right)),
        is_stdin=row.get("is_stdin", False),
    )


_ROWS = yaml.safe_load(Path(__file__).with_name("hostile_programs.yaml").read_text())
CASES = [_case(family, row) for family, rows in _ROWS["hostile"].items() for row in rows]
HONEST = [_case("honest", row) for row in _ROWS["honest"]]


def verdict_of(jail: Jail, case: Case) -> Verdict:
    """The case as the verifier gets it."""
    call = CallTest(function="f", args=[3], expected=9)
    test = StdinTest(input="3\n", output="9") if case.is_stdin else call
    return jail.result(case.code, test).verdict


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
        before, files = self._state(), _in_shared_memory()
        yield
        deadline_s = time.monotonic() + 5
        while (after := (self._state(), _in_shared_memory() - files)) != (before, set()):
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


@contextlib.contextmanager
def other_user() -> Iterator[list[str]]:
    """The command that runs this script as another user, with the project as it is installed but
    readable by all.
    """
    with tempfile.TemporaryDirectory(prefix="async_rl-corpus-", dir="/var/tmp") as name:
        tree = Path(name)
        tree.chmod(0o755)
        (tree / "async_rl").mkdir(mode=0o755)
        parts = [*(ROOT / "async_rl").glob("*")]
        for part in (*parts, *(ROOT / folder for folder in ("launchers", "sandbox", "conf"))):
            (tree / "async_rl" / part.name).symlink_to(part)
        packages = next(Path(path) for path in sys.path if path.endswith("site-packages"))
        become = f"setpriv --reuid={OTHER} --regid={OTHER} --clear-groups --inh-caps=-all".split()
        script = [str(SYSTEM_PYTHON), "-B", str(Path(__file__).resolve())]
        yield [*become, "env", f"PYTHONPATH={tree}:{packages}", *script]


def can_become_other() -> bool:
    """Whether `other_user` works here: an environment beneath a private directory, such as /root,
    can be read by its owner alone.
    """
    paths = Path(psutil.__file__).resolve().parents
    has_tools = shutil.which("setpriv") is not None and SYSTEM_PYTHON.exists()
    return os.geteuid() == 0 and has_tools and all(path.stat().st_mode & 0o001 for path in paths)


def _in_shared_memory() -> set[str]:
    """The names that a program can have made."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(_OTHERS)}


def run_all(level: int, *, few: bool = False) -> list[tuple[str, str, str, bool]]:
    """(family, name, verdict, whether it is right) of each program, or of the first of each family.
    Raises if the host changed.
    """
    results = []
    jail = Jail(level)
    families = {case.family: case for case in reversed((*CASES, *HONEST))}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        host = Host(Path(directory))
        try:
            if jail.cells.level != level:
                raise SystemExit(f"this machine has no level {level}: {jail.cells.reasons}")
            for case in families.values() if few else (*CASES, *HONEST):
                if case.works_at(level):
                    with host.unchanged(case.name):
                        verdict = verdict_of(jail, case)
                    results.append((case.family, case.name, str(verdict), verdict in case.right))
            assert jail.cells.num_replaced == 0
        finally:
            host.close()
            jail.close()
    return results


def _table() -> None:
    with contextlib.ExitStack() as stack:
        users = {os.geteuid(): [sys.executable, str(Path(__file__).resolve())]}
        if can_become_other():
            users[OTHER] = stack.enter_context(other_user())
        for level, user in itertools.product(LEVELS, users):
            results = json.loads(subprocess.check_output([*users[user], str(level)], cwd="/"))
            lines = [f"{LEVELS[level]}, uid {user}"]
            for family, group in itertools.groupby(results, key=itemgetter(0)):
                found = list(group)
                lines.append(f"  {family:11}{sum(each[3] for each in found)} of {len(found)}")
                lines += [f"    {each[1]} got {each[2]}" for each in found if not each[3]]
            sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        found = run_all(int(sys.argv[1]), few="few" in sys.argv)
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        _table()
