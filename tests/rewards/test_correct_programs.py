"""Programs that are right and are written as programs are: each passes, in every way to test it."""

from __future__ import annotations

import pytest
from rewards_support import Jail

from async_rl.core.types import AnswerTest, AssertTest, CallTest, CodeTest, StdinTest, Verdict
from async_rl.rewards.answers import is_right
from async_rl.rewards.verifier.protocol import VerifyRequest
from async_rl.sandbox.comparison import shorten

READ = "a, b = map(int, input().split())\nprint(a + b)"
SUM = StdinTest(input="1 2\n", output="3\n")
DEEP = (
    "import sys, threading\nsys.setrecursionlimit(10 ** 6)\nthreading.stack_size({size})\n"
    "def depth(n):\n    return n and 1 + depth(n - 1)\n"
    "t = threading.Thread(target=lambda: print(depth(50_000)))\nt.start()\nt.join()"
)
PASSING: dict[str, tuple[str, CodeTest]] = {
    "byte order mark": (f"\ufeff{READ}", SUM),
    "/dev/stdin": ("import sys\nprint(sum(map(int, open('/dev/stdin').read().split())))", SUM),
    "/dev/stdout": ("with open('/dev/stdout', 'w') as out:\n    out.write('3\\n')", SUM),
    "descriptor 0": ("import os\nprint(sum(map(int, os.read(0, 99).split())))", SUM),
    "open(0)": ("print(sum(map(int, open(0).read().split())))", SUM),
    "modes and sizes of the streams, as fast readers use them": (
        "import io, os, sys\nassert (sys.stdin.mode, sys.stdout.mode) == ('r', 'w')\n"
        "size = max(os.fstat(sys.stdin.fileno()).st_size, 8192)\n"
        "data = io.BytesIO(os.read(0, size))\n"
        "os.write(1, b'%d\\n' % sum(map(int, data.readline().split())))",
        SUM,
    ),
    "builtins of its own, and as a module": (
        "import builtins\nbuiltins.input = lambda: '1 2'\n__builtins__.total = sum\n"
        "print(total(map(int, input().split())))",
        SUM,
    ),
    "32 threads in a pool": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(32) as pool:\n"
        "    print(sum(pool.map(int, input().split())))",
        SUM,
    ),
    "setrlimit": (
        "import resource\nresource.setrlimit(resource.RLIMIT_STACK, (-1, -1))\n"
        f"resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))\n{READ}",
        SUM,
    ),
    "a thread's stack of 64 MB": (DEEP.format(size=1 << 26), StdinTest(input="", output="50000")),
    "a thread's stack of 512 MB": (DEEP.format(size=1 << 29), StdinTest(input="", output="50000")),
    "a large power in a test": (
        "def f(n):\n    return 10 ** n",
        AssertTest(code="assert f(20000) == 10 ** 20000"),
    ),
    "import of the solution": (
        "def f(x):\n    return x",
        AssertTest(code="from solution import f\nassert f(1) == 1"),
    ),
    "defaultdict in an assertion": (
        "from collections import defaultdict\ndef f():\n    return defaultdict(list, {1: [2]})",
        AssertTest(code="assert f() == {1: [2]}"),
    ),
    "defaultdict for JSON": (
        "from collections import defaultdict\ndef f():\n    return defaultdict(list, {'a': [2]})",
        CallTest(function="f", args=[], expected={"a": [2]}, types="json"),
    ),
    "tuple for JSON": (
        "def f():\n    return [(1, 2), (3, 4)]",
        CallTest(function="f", args=[], expected=[[1, 2], [3, 4]], types="json"),
    ),
    "int for JSON's 2.0": (
        "def f():\n    return 4 // 2",
        CallTest(function="f", args=[], expected=2.0, types="json"),
    ),
    "109 KB of output": (
        "print('x' * 109_000)",
        StdinTest(input="", output="x" * 109_000),
    ),
}


@pytest.mark.parametrize("name", PASSING)
def test_a_correct_program_passes(jail: Jail, name: str) -> None:
    code, test = PASSING[name]
    response = jail.verify(VerifyRequest(code=code, tests=[test], timeout_s=3, memory_mb=256))
    assert response.verdict is Verdict.PASS, response


def test_no_limit_is_lifted_by_a_program_that_asks_for_it(jail: Jail) -> None:
    code = (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\n"
        "x = bytearray(1 << 29)\nprint(3)"
    )
    request = VerifyRequest(code=code, tests=[SUM], memory_mb=64)
    assert jail.verify(request).verdict is Verdict.MEMORY


@pytest.mark.parametrize(
    ("expected", "response", "right"),
    [
        ("50", r"\boxed{50\%}", True),
        (r"50\%", r"\boxed{50}", True),
        (r"50\%", r"\boxed{50\%}", True),
        ("50", r"\boxed{5\%}", False),
        ("50", r"\boxed{5000\%}", False),
    ],
)
def test_a_percent_sign_may_be_left_out(expected: str, response: str, right: bool) -> None:
    assert is_right(AnswerTest(rule="math", expected=expected), response) is right


def test_an_integer_of_many_digits_fits_into_a_message() -> None:
    assert len(shorten(10**20_000)) < 200
