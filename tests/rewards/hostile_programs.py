"""Programs that try to get a verdict they do not deserve, or to harm the host; each with the
verdicts that are right for it.

Unless it says otherwise, a program is called as `f(3)` and 9 is expected.  `Case.stdin`: run with
input "3\\n", "9" is expected.
"""

from __future__ import annotations

from dataclasses import dataclass

from async_rl.core.types import Verdict

WRONG, ERROR, TIMEOUT = Verdict.WRONG_ANSWER, Verdict.RUNTIME_ERROR, Verdict.TIMEOUT
MEMORY, OUTPUT, COMPILE, PASS = (
    Verdict.MEMORY,
    Verdict.OUTPUT_LIMIT,
    Verdict.COMPILE_ERROR,
    Verdict.PASS,
)


@dataclass(frozen=True)
class Case:
    name: str
    family: str
    code: str
    right: tuple[Verdict, ...]
    is_stdin: bool = False


CASES: list[Case] = []


def _case(
    family: str,
    name: str,
    right: Verdict | tuple[Verdict, ...],
    code: str,
    *,
    is_stdin: bool = False,
) -> None:
    CASES.append(
        Case(name, family, code, right if isinstance(right, tuple) else (right,), is_stdin)
    )


# ---- leaving early
_case("leaving", "sys.exit at import", ERROR, "import sys\nsys.exit(0)")
_case("leaving", "sys.exit in the call", ERROR, "import sys\ndef f(x):\n    sys.exit(0)")
_case("leaving", "os._exit at import", ERROR, "import os\nos._exit(0)")
_case("leaving", "os._exit in the call", ERROR, "import os\ndef f(x):\n    os._exit(0)")
_case("leaving", "raise SystemExit", ERROR, "raise SystemExit(0)")
_case("leaving", "exit() builtin", ERROR, "def f(x):\n    exit()")
_case("leaving", "KeyboardInterrupt", ERROR, "def f(x):\n    raise KeyboardInterrupt")
_case("leaving", "exec another program", ERROR, "import os\nos.execv('/usr/bin/true', ['true'])")
_case("leaving", "abort", ERROR, "import os\ndef f(x):\n    os.abort()")
_case("leaving", "null pointer", ERROR, "import ctypes\ndef f(x):\n    ctypes.string_at(0)")
_case(
    "leaving",
    "os._exit with a right-looking print",
    ERROR,
    "import os\ndef f(x):\n    os.write(1, b'9')\n    os._exit(0)",
)
_case(
    "leaving",
    "exit status 1 after the right output",
    ERROR,
    "print(9)\nimport sys\nsys.exit(1)",
    is_stdin=True,
)
_case("leaving", "os._exit(0) without output", WRONG, "import os\nos._exit(0)", is_stdin=True)
_case(
    "leaving",
    "kill itself",
    ERROR,
    "import os, signal\ndef f(x):\n    os.kill(os.getpid(), signal.SIGKILL)",
)

# ---- lying objects
_LIAR = (
    "class L({base}):\n    def __eq__(self, o): return True\n    def __ne__(self, o): return"
    " False\n    def __hash__(self): return 0\n"
)
for _base, _value in (
    ("object", ""),
    ("int", "1"),
    ("str", "'x'"),
    ("list", "[1]"),
    ("float", "1.0"),
    ("dict", "{}"),
    ("tuple", "()"),
):
    _case(
        "lying",
        f"{_base} equal to all",
        WRONG,
        _LIAR.format(base=_base) + f"def f(x):\n    return L({_value})",
    )
_case(
    "lying",
    "__class__ property",
    WRONG,
    "class L:\n    __class__ = property(lambda s: int)\n    __eq__ = lambda s, o: True\ndef f(x):\n"
    "    return L()",
)
_case(
    "lying",
    "metaclass instancecheck",
    WRONG,
    "class M(type):\n    def __eq__(c, o): return True\n    __hash__ = type.__hash__\nclass"
    " L(metaclass=M): pass\ndef f(x):\n    return L",
)
_case(
    "lying",
    "int subclass with the right value",
    WRONG,
    "class I(int): pass\ndef f(x):\n    return I(9)",
)
_case("lying", "True for 1", WRONG, "def f(x):\n    return True")
_case("lying", "float for int", WRONG, "def f(x):\n    return 9.0")
_case("lying", "list around it", WRONG, "def f(x):\n    return [9]")
_case("lying", "string of it", WRONG, "def f(x):\n    return '9'")
_case(
    "lying",
    "patched builtins",
    (WRONG, ERROR, MEMORY),
    "import builtins\nbuiltins.isinstance = lambda *a: True\nbuiltins.type = lambda *a:"
    " int\nbuiltins.all = lambda *a: True\ndef f(x):\n    return 1",
)
_case(
    "lying",
    "patched operator and json",
    (WRONG, ERROR),
    "import operator, json\noperator.eq = lambda a, b: True\njson.dumps = lambda *a, **k:"
    " '9'\njson.JSONEncoder.encode = lambda *a: '9'\ndef f(x):\n    return 1",
)
_case(
    "lying",
    "repr of the expected",
    WRONG,
    "class R:\n    def __repr__(self): return '9'\n    __str__ = __repr__\ndef f(x):\n   "
    " return R()",
)
_case("lying", "nan", WRONG, "def f(x):\n    return float('nan')")
_case("lying", "None", WRONG, "def f(x):\n    pass")
_case(
    "lying",
    "descriptor that raises in __class__",
    (WRONG, ERROR),
    "class L:\n    @property\n    def __class__(self): raise ValueError\ndef f(x):\n    return L()",
)

# ---- reading the harness
_FRAMES = """
import sys, gc
def f(x):
    seen = []
    frame = sys._getframe()
    while frame:
        # From Python 3.13 on the local names of a function are no dict.
        seen.append(dict(frame.f_locals)); seen.append(frame.f_globals)
        frame = frame.f_back
    for o in seen + gc.get_objects():
        if isinstance(o, dict) and 'expected' in o:
            return o['expected']
    return None
"""
_case("reading", "frames and gc", WRONG, _FRAMES)
_case(
    "reading",
    "descriptors",
    WRONG,
    "import os\ndef f(x):\n    for fd in range(64):\n        try:\n            data = os.pread(fd,"
    " 99999, 0)\n        except OSError:\n            continue\n        if b'expected' in data:"
    " return 9\n    return None",
)
_case(
    "reading",
    "environment",
    WRONG,
    "import os\ndef f(x):\n    return [v for k, v in os.environ.items() if 'TOKEN' in k or 'KEY' in"
    " k] or 0",
)
_case("reading", "/proc", ERROR, "def f(x):\n    return open('/proc/self/maps').read()")
_case("reading", "passwd", ERROR, "def f(x):\n    return open('/etc/passwd').read()")
_case("reading", "project files", ERROR, "import os\ndef f(x):\n    return os.listdir('/work')")
_case(
    "reading",
    "parent's memory",
    ERROR,
    "import os\ndef f(x):\n    return open(f'/proc/{os.getppid()}/mem', 'rb').read(1)",
)
_case(
    "reading",
    "home",
    ERROR,
    "import os\ndef f(x):\n    return os.listdir('/root/.ssh') + os.listdir('/home/x')",
)
_case(
    "reading",
    "harness from sys.modules",
    WRONG,
    "import sys\ndef f(x):\n    return sorted(m for m in sys.modules if 'judg' in m or 'reward' in"
    " m and m != 'x') and 0",
)

# ---- forged results and abuse of the result file
_FORGE = (
    "import os\ndef f(x):\n    for fd in range(3, 64):\n        try:\n            os.write(fd,"
    " {frame})\n        except OSError:\n            pass\n    os._exit(0)"
)
_case("forging", "a pass frame", (WRONG, ERROR), _FORGE.format(frame="b'0 p 0 pass\\n'"))
_case("forging", "a done frame", (WRONG, ERROR), _FORGE.format(frame="b'0 d 0 0\\n'"))
_case(
    "forging", "a JSON verdict", (WRONG, ERROR), _FORGE.format(frame='b\'{"verdict": "pass"}\\n\'')
)
_case(
    "forging",
    "a deep value",
    WRONG,
    _FORGE.format(frame="b'0 v 0 ' + b'[' * 20000 + b']' * 20000 + b'\\n'"),
)
_case("forging", "a huge number", WRONG, _FORGE.format(frame="b'0 v 0 ' + b'9' * 50000 + b'\\n'"))
_case("forging", "unknown tag", WRONG, _FORGE.format(frame="b'0 v 0 {\"z\": 1}\\n'"))
_case("forging", "unhashable set", WRONG, _FORGE.format(frame="b'0 v 0 {\"s\": [[1]]}\\n'"))
_case("forging", "binary garbage", WRONG, _FORGE.format(frame="bytes(range(256)) * 20 + b'\\n'"))
_case(
    "forging",
    "truncated file",
    (WRONG, ERROR),
    "import os\ndef f(x):\n    for fd in range(3, 64):\n        try:\n            os.ftruncate(fd,"
    " 0)\n        except OSError:\n            pass\n    return 1",
)
_case("forging", "cyclic list", WRONG, "def f(x):\n    a = []\n    a.append(a)\n    return a")
_case(
    "forging",
    "deep list",
    WRONG,
    "def f(x):\n    a = 9\n    for _ in range(50000): a = [a]\n    return a",
)
_case(
    "forging",
    "colliding integers",
    WRONG,
    "def f(x):\n    return {(2**61 - 1) * i for i in range(1500)}",
)
_case("forging", "lone surrogates", WRONG, "def f(x):\n    return '\\ud800'")
_case("forging", "error with surrogates", ERROR, "def f(x):\n    raise ValueError('\\ud800\\x00')")
_case(
    "forging",
    "exception whose str raises",
    ERROR,
    "class E(Exception):\n    def __str__(self): raise E()\ndef f(x):\n    raise E()",
)
_case(
    "forging",
    "closed descriptors",
    (WRONG, ERROR),
    "import os\ndef f(x):\n    os.closerange(0, 256)\n    return 9",
)

# ---- exhaustion
_case("exhaustion", "endless loop", TIMEOUT, "def f(x):\n    while True: pass")
_case("exhaustion", "endless loop at import", TIMEOUT, "while True: pass")
_case(
    "exhaustion",
    "swallows everything",
    TIMEOUT,
    "def f(x):\n    while True:\n        try:\n            while True: pass\n        except"
    " BaseException: pass",
)
_case(
    "exhaustion",
    "ignores signals",
    TIMEOUT,
    "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except"
    " (OSError, ValueError): pass\ndef f(x):\n    while True: pass",
)
_case("exhaustion", "loop in C", TIMEOUT, "def f(x):\n    return sum(range(10**13))")
_case("exhaustion", "power", TIMEOUT, "def f(x):\n    return 7 ** (10**9)")
_case(
    "exhaustion",
    "regular expression",
    TIMEOUT,
    "import re\ndef f(x):\n    return re.match('(a+)+$', 'a' * 64 + 'b')",
)
_case(
    "exhaustion",
    "threads that spin",
    TIMEOUT,
    "import threading\ndef spin():\n    while True: pass\ndef f(x):\n    ts ="
    " [threading.Thread(target=spin) for _ in range(4)]\n    [t.start() for t in ts]\n    [t.join()"
    " for t in ts]",
)
_case("exhaustion", "sleep", TIMEOUT, "import time\ndef f(x):\n    time.sleep(1000)")
_case(
    "exhaustion",
    "deadlock",
    TIMEOUT,
    "import threading\ndef f(x):\n    l = threading.Lock(); l.acquire(); l.acquire()",
)
_case("exhaustion", "waits for input", (TIMEOUT, ERROR), "def f(x):\n    return input()")
_case("exhaustion", "list of a billion", MEMORY, "def f(x):\n    return [0] * 10**9")
_case("exhaustion", "memory at import", MEMORY, "a = bytearray(4 << 30)")
_case(
    "exhaustion",
    "memory step by step",
    MEMORY,
    "def f(x):\n    a = []\n    while True: a.append(bytearray(1 << 20))",
)
_case(
    "exhaustion",
    "memory, swallowed",
    (MEMORY, TIMEOUT),
    "def f(x):\n    a = []\n    while True:\n        try: a.append(bytearray(1 << 20))\n       "
    " except MemoryError: pass",
)
_case(
    "exhaustion",
    "shared mapping",
    (MEMORY, ERROR),
    "import mmap\ndef f(x):\n    return [mmap.mmap(-1, 1 << 30) for _ in range(64)] and 9 // 0",
)
_case("exhaustion", "fork bomb", ERROR, "import os\nwhile True: os.fork()")
_case(
    "exhaustion",
    "subprocess",
    ERROR,
    "import subprocess\ndef f(x):\n    return subprocess.run(['/usr/bin/id'])",
)
_case(
    "exhaustion",
    "multiprocessing",
    ERROR,
    "import multiprocessing\ndef f(x):\n    with multiprocessing.Pool(2) as p: return p.map(abs,"
    " [1])",
)
_case(
    "exhaustion",
    "threads without end",
    (ERROR, MEMORY),
    "import threading, time\ndef f(x):\n    while True: threading.Thread(target=time.sleep,"
    " args=(100,), daemon=True).start()",
)
_case(
    "exhaustion",
    "descriptors",
    ERROR,
    "import os\ndef f(x):\n    while True: os.open('/dev/null', os.O_RDONLY)",
)
_case(
    "exhaustion",
    "inodes",
    ERROR,
    "def f(x):\n    for i in range(10**6): open(f'/tmp/{i}', 'w').close()",
)
_case(
    "exhaustion",
    "disk",
    ERROR,
    "def f(x):\n    for i in range(10**4): open(f'/tmp/{i}', 'wb').write(bytes(60000))",
)
_case("exhaustion", "huge value", OUTPUT, "def f(x):\n    return 'x' * 10**7")
_case("exhaustion", "endless output", OUTPUT, "while True: print('x' * 1000)", is_stdin=True)
_case(
    "exhaustion",
    "output through the descriptor",
    OUTPUT,
    "import os\ntry:\n    while True: os.write(1, b'x' * 1000)\nexcept OSError: pass",
    is_stdin=True,
)
_case("exhaustion", "recursion", ERROR, "def f(x):\n    return f(x)")
_case(
    "exhaustion",
    "deep C recursion",
    (ERROR, MEMORY),
    "import sys\nsys.setrecursionlimit(10**9)\ndef f(x):\n    class A:\n        def __repr__(self):"
    " return repr(self)\n    return repr(A())",
)
_case(
    "exhaustion",
    "raises its limits",
    MEMORY,
    "import resource\ndef f(x):\n    try: resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\n   "
    " except (OSError, ValueError): pass\n    return bytearray(4 << 30)",
)

# ---- network, signals, other processes
_case(
    "outside",
    "socket",
    ERROR,
    "import socket\ndef f(x):\n    socket.create_connection(('127.0.0.1', 80), 1)",
)
_case(
    "outside",
    "unix socket",
    ERROR,
    "import socket\ndef f(x):\n    socket.socket(socket.AF_UNIX).connect('/run/x')",
)
_case("outside", "kill all", ERROR, "import os\ndef f(x):\n    os.kill(-1, 9)")
_case("outside", "kill parent", ERROR, "import os\ndef f(x):\n    os.kill(os.getppid(), 9)")
_case("outside", "kill pid 1", ERROR, "import os\ndef f(x):\n    os.kill(1, 9)")
_case(
    "outside",
    "ptrace",
    WRONG,
    "import ctypes\ndef f(x):\n    return ctypes.CDLL(None).ptrace(16, 1, 0, 0)",
)
_case(
    "outside",
    "mount",
    WRONG,
    "import ctypes\ndef f(x):\n    return ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0,"
    " None)",
)
_case(
    "outside",
    "new user namespace",
    WRONG,
    "import ctypes\ndef f(x):\n    return ctypes.CDLL(None).unshare(0x10000000)",
)
_case(
    "outside",
    "become root",
    ERROR,
    "import os\ndef f(x):\n    os.setuid(0); os.seteuid(0); os.chroot('/')",
)
_case(
    "outside",
    "write to the interpreter",
    ERROR,
    "import os\ndef f(x):\n    open(os.__file__, 'a').write('x')",
)
_case("outside", "write to /usr", ERROR, "def f(x):\n    open('/usr/bin/x', 'w')")

_SYSCALL = "import ctypes\ndef f(x):\n    return ctypes.CDLL(None).syscall({arguments})"
for _name, _arguments in (
    ("read another process's memory", "310, 1, 0, 0, 0, 0, 0"),
    ("write to another process's memory", "311, 1, 0, 0, 0, 0, 0"),
    ("memfd_create", "319, b'x', 0"),
    ("io_uring", "425, 8, 0"),
    ("bpf", "321, 0, 0, 0"),
    ("perf_event_open", "298, 0, 0, -1, -1, 0"),
    ("userfaultfd", "323, 0"),
    ("keyctl", "250, 0, -3"),
    ("clone a process", "56, 17, 0, 0, 0, 0"),
    ("vfork", "58"),
    ("limits of pid 1", "302, 1, 7, 0, 0"),
    ("pidfd of the parent", "434, 1, 0"),
    ("open by handle", "304, 0, 0, 0"),
    ("new seccomp filter", "317, 1, 0, 0"),
    ("system clock", "227, 0, b'0' * 16"),
    ("host name", "170, b'x', 1"),
):
    _case("outside", _name, WRONG, _SYSCALL.format(arguments=_arguments))
_case("outside", "chmod of the scratch", ERROR, "import os\ndef f(x):\n    os.chmod('/tmp', 0o000)")
_case(
    "outside",
    "link out of the scratch",
    ERROR,
    "import os\ndef f(x):\n    os.symlink('/etc/passwd', '/tmp/p')\n    return"
    " open('/tmp/p').read()",
)
_case("outside", "shared memory", ERROR, "def f(x):\n    open('/dev/shm/x', 'w').write('x')")

# ---- source tricks
_case("source", "syntax error", COMPILE, "def f(x:")
_case("source", "null byte", COMPILE, "def f(x):\n    return 9\x00")
_case("source", "nested parentheses", COMPILE, "(" * 5000 + ")" * 5000)
_case("source", "deep expression", (COMPILE, ERROR), "x = " + "-" * 200_000 + "1")
_case(
    "source",
    "coding cookie",
    (COMPILE, ERROR, WRONG),
    "# coding: utf-7\n+AGYAbwBv-\ndef f(x): return 1",
)
_case("source", "surrogate", COMPILE, "x = '\ud800'")
_case("source", "return outside", COMPILE, "return 9")
_case("source", "template breakout", ERROR, "'''\"\"\"\ndef f(x): return 9\n'''; raise ValueError")
_case("source", "empty", ERROR, "")
_case("source", "no such function", ERROR, "def g(x): return 9")
_case(
    "source",
    "giant constant",
    (WRONG, TIMEOUT, MEMORY, COMPILE),
    "x = 9 ** 9 ** 6\ndef f(y): return 1",
)

HONEST: list[Case] = []


def _honest(name: str, code: str, *, is_stdin: bool = False) -> None:
    HONEST.append(Case(name, "honest", code, (PASS,), is_stdin))


_honest("square", "def f(x):\n    return x * x")
_honest(
    "silent output",
    "import os\ndef f(x):\n    print('noise', file=open(os.devnull, 'w'))\n    return x * x",
)
_honest("Solution", "class Solution:\n    def f(self, x: int) -> List[int]:\n        return x * x")
_honest(
    "star imports",
    "from typing import *\nfrom math import *\nfrom collections import *\ndef f(x):\n    return"
    " int(pow(x, 2))",
)
_honest(
    "threads",
    "import threading\ndef f(x):\n    r = []\n    t = threading.Thread(target=lambda: r.append(x *"
    " x)); t.start(); t.join()\n    return r[0]",
)
_honest(
    "thread pool",
    "from concurrent.futures import ThreadPoolExecutor\ndef f(x):\n    with ThreadPoolExecutor(4)"
    " as p: return sum(p.map(lambda i: x, range(3)))",
)
_honest(
    "asyncio",
    "import asyncio\nasync def g(x):\n    await asyncio.sleep(0)\n    return x * x\ndef f(x):\n   "
    " return asyncio.run(g(x))",
)
_honest(
    "recursion to 100000",
    "import sys\nsys.setrecursionlimit(200000)\ndef g(n): return 0 if n == 0 else 1 + g(n - 1)\ndef"
    " f(x):\n    assert g(100000) == 100000\n    return 9",
)
_honest("big integers", "def f(x):\n    return int(str(10**4000 + 9)[-1])")
_honest(
    "dataclass",
    "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\ndef f(x):\n    return"
    " P(x).x ** 2",
)
_honest(
    "numbers and re",
    "import re, decimal, fractions, statistics\ndef f(x):\n    return int(decimal.Decimal(x) *"
    " fractions.Fraction(x).numerator)",
)
_honest(
    "scratch file",
    "import os\ndef f(x):\n    open('/tmp/a', 'w').write('9')\n    return"
    " int(open('/tmp/a').read())",
)
_honest("prints a lot", "def f(x):\n    for _ in range(20000): print('noise' * 10)\n    return 9")
_honest("stdin read", "import sys\nprint(int(sys.stdin.read()) ** 2)", is_stdin=True)
_honest(
    "stdin input", "if __name__ == '__main__':\n    print(int(input()) ** 2, end='')", is_stdin=True
)
_honest("stdin open(0)", "print(int(open(0).read()) ** 2)", is_stdin=True)
_honest(
    "stdin descriptor",
    "import os\nos.write(1, str(int(os.read(0, 99)) ** 2).encode())",
    is_stdin=True,
)
_honest("stdin exit(0)", "print(9)\nexit()", is_stdin=True)
_honest(
    "stdin os._exit(0) after a flush", "import os\nprint(9, flush=True)\nos._exit(0)", is_stdin=True
)
_honest(
    "stdin atexit and thread",
    "import threading, atexit\natexit.register(lambda:"
    " print(9))\nthreading.Thread(target=int).start()",
    is_stdin=True,
)
_honest("stdin float format", "print('9.0000000000')", is_stdin=True)
_honest(
    "deep recursion on a larger stack",
    "import sys, threading\nsys.setrecursionlimit(200000)\nthreading.stack_size(64 << 20)\nclass"
    " A(list):\n    def __repr__(self): return repr(self[0]) if self else '9'\ndef g(n): return 0"
    " if n == 0 else 1 + g(n - 1)\ndef f(x):\n    r = []\n    t = threading.Thread(target=lambda:"
    " r.append(g(100000))); t.start(); t.join()\n    return 9 if r == [100000] else 0",
)
_honest(
    "lambda, closure, generator",
    "def f(x):\n    return sum(1 for _ in filter(lambda i: i >= 0, (i for i in range(x * x))))",
)
_honest(
    "reads all lines",
    "import sys\nfor line in sys.stdin.readlines(): print(int(line) ** 2)",
    is_stdin=True,
)
_honest("big power modulo", "def f(x):\n    return pow(7, 10**18, 10**9 + 7) and x * x")
_honest(
    "class Solution with state",
    "class Solution:\n    def __init__(self): self.k = 3\n    def f(self, x): return self.k * x",
)
