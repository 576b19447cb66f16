"""A verifier that a Python program starts for itself."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

import async_rl
from async_rl.core.errors import ConfigError
from async_rl.core.types import CallTest, Verdict

SQUARE = "def f(x): return x * x"


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


@pytest.fixture(scope="module")
def verifier() -> Iterator[async_rl.Verifier]:
    before = children()
    with async_rl.Verifier({"verifiers.cells": 1, "sandbox": {"timeout_s": 1}}) as running:
        assert children() != before
        yield running
    assert children() == before, "nothing is left"


def test_tests_are_text_objects_or_values_with_setup_code(
    verifier: async_rl.Verifier,
) -> None:
    assert verifier.check(SQUARE, "assert f(3) == 9").verdict is Verdict.PASS
    wrong = {"kind": "call", "function": "f", "args": [3], "expected": 8}
    right = CallTest(function="f", args=[3], expected=9)
    response = verifier.check(SQUARE, [right, wrong])
    assert response.verdict is Verdict.WRONG_ANSWER
    assert [test.verdict for test in response.tests] == [Verdict.PASS, Verdict.WRONG_ANSWER]
    assert response.tests[1].message == "f(3) returned 9, not 8"
    with pytest.raises(ConfigError, match=r"is not a valid test \(.*docs/data.md lists the kinds"):
        verifier.check(SQUARE, {"kind": "call", "function": "f"})

    async def cell() -> Verdict:
        """A cell of a notebook: an event loop is running."""
        return verifier.check(SQUARE, "assert f(2) == 4").verdict

    assert asyncio.run(cell()) is Verdict.PASS

    # Settings are used, too.
    assert verifier.check(SQUARE, "assert f(n) == 9", setup="n = 3").verdict is Verdict.PASS
    slow = verifier.check("while True: pass", "assert f() is None")
    assert slow.verdict is Verdict.TIMEOUT
    assert slow.tests[0].message == "used more than 1 s of CPU time"


def test_wrong_settings_and_a_jail_that_cannot_start_are_refused_and_nothing_is_left() -> None:
    with pytest.raises(ConfigError, match="without a run only sandbox"):
        async_rl.Verifier({"num_steps": 3})
    before = children()
    broken = async_rl.Verifier({"sandbox.packages": ["no_such_package"]})
    with pytest.raises(ConfigError, match="the package 'no_such_p"), broken:
        pass
    with pytest.raises(ConfigError, match="not running; use it in its with block"):
        broken.check(SQUARE, "assert f(2) == 4")
    assert children() == before


def test_it_ends_with_the_process_that_started_it() -> None:
    code = """
import async_rl, psutil, sys
with async_rl.Verifier({"verifiers.cells": 1}):
    print(psutil.Process().children()[0].pid, flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        server = os.pidfd_open(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
    try:
        assert select.select([server], [], [], 20)[0], "the server ends"
    finally:
        os.close(server)
