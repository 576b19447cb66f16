import contextlib
import os
import resource
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from rewards_support import TOKEN, Jail, Served

from async_rl.core.types import CallTest, StdinTest, Verdict
from async_rl.sandbox.protocol import NAMESPACES
from benchmarks.attacks import suite
from benchmarks.attacks.suite import FORMS, Outcome, Trial, attacks, run

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


Unchanged = Callable[[str], AbstractContextManager[None]]


@pytest.fixture(scope="session")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Unchanged]:
    """A block that may not change the host for good: a file to spoil, a process to kill, and
    everything else about it. Tests that run at the same time may have a file in /dev/shm for some
    seconds, or delete one.
    """
    canary = tmp_path_factory.mktemp("host") / "canary"
    canary.write_text("expected: 9")
    shared = Path(f"/dev/shm/async-rl-canary-{os.getpid()}")
    shared.touch()
    victim = subprocess.Popen(["/bin/sleep", "3600"])

    def state() -> dict[str, object]:
        return {
            "canary": (canary.read_text(), canary.stat().st_mtime_ns),
            "victim": victim.poll(),
            "mounts": Path("/proc/self/mounts").read_text(),
            "host name": socket.gethostname(),
            "shared memory": shared.exists(),
            "interpreter": Path(os.__file__).stat().st_mtime_ns,
            "limits": [resource.getrlimit(which) for which in range(16)],
            "environment": dict(os.environ),
            "children": len(psutil.Process().children()),
        }

    @contextlib.contextmanager
    def block(name: str) -> Iterator[None]:
        before, files = state(), in_shared_memory()
        yield
        deadline_s = time.monotonic() + 5
        while (after := (state(), in_shared_memory() - files)) != (before, set()):
            assert time.monotonic() < deadline_s, (name, before, after)
            time.sleep(0.1)

    yield block
    shared.unlink(missing_ok=True)
    victim.kill()
    victim.wait()


@pytest.mark.parametrize("case", CASES)
def test_program_gets_its_right_verdict_and_harms_nothing(
    each_jail: Jail, unchanged: Unchanged, case: dict[str, Any]
) -> None:
    has_namespaces = each_jail.cells.level == NAMESPACES
    if case["name"] == "scratch file" and not has_namespaces:
        pytest.skip("the scratch needs namespaces")
    call = CallTest(function="f", args=[3], expected=9)
    test = StdinTest(input="3\n", output="9") if case.get("is_stdin") else call
    right = case.get("right", "pass")
    with unchanged(case["name"]):
        verdict = each_jail.result(case["code"], test).verdict
        assert verdict in ([right] if isinstance(right, str) else right), verdict
    assert each_jail.cells.num_replaced == 0
    # An honest program passes in the cell, and nothing that the hostile one wrote is left.
    if has_namespaces:
        after = each_jail.result(SEES_NOTHING, call)
        assert after.verdict is Verdict.PASS, after


def test_no_attack_of_the_public_suite_is_forged_or_crashes_the_verifier(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One verifier for all forms: it compiles each program once, and programs that wait or loop
    take the same seconds.
    """
    assert len({(attack.family, attack.name) for attack in attacks()}) == len(attacks())
    # Waiting and looping programs take most of the time.
    monkeypatch.setattr(suite, "TIMEOUT_S", 0.5)

    def trials_of(form: str) -> list[Trial]:
        return list(run(served.url, form, TOKEN))

    with ThreadPoolExecutor() as threads:
        found = list(threads.map(trials_of, FORMS))
    for form, trials in zip(FORMS, found, strict=True):
        assert [trial for trial in trials if trial.outcome is not Outcome.HELD] == [], form
        assert any(trial.attack.family == "honest" for trial in trials), form
    assert len({trial.attack.family for trial in found[0]}) >= 8
