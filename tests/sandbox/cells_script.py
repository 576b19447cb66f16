"""Runs on any Python 3.11 with nothing but the jail: starts a pool, says what it reached, runs
programs, and waits to be ended.

Arguments: directory that holds the package `sandbox`, best level, "stay" to wait for the end of
standard input.
"""

import asyncio
import json
import os
import sys

sys.path.insert(0, sys.argv[1])

from sandbox.cell import job
from sandbox.cells import Cells
from sandbox.protocol import JobSpec, Mode, read_frames

PROGRAMS = {
    "square": "def f(x): return x * x",
    "passwd": "def f(x): return open('/etc/passwd').read()",
    "fork": "import os\ndef f(x): return os.fork()",
    "socket": "import socket\ndef f(x): return str(socket.socket(socket.AF_INET, x - 2))",
    "write": "def f(x): return open('/var/tmp/async_rl-written', 'w').write('x')",
    "signal": "import os\ndef f(x): return os.kill(os.getppid(), 9)",
    "loop": "def f(x):\n    while True: pass",
    "memory": "def f(x): return [0] * 10**9",
    "import": "import xml.dom.minidom, sqlite3\ndef f(x): return 1",
}


async def main() -> None:
    async with await Cells.start(2, best_level=int(sys.argv[2])) as cells:
        said = {
            "level": cells.level,
            "uid": os.getuid(),
            "reasons": cells.reasons,
            "pids": [cell.pid for cell in cells.alive],
        }
        request = JobSpec(Mode.CALLS, 1, cpu_s=0.3, memory_bytes=128 << 20, output_bytes=1 << 16)
        for name, code in PROGRAMS.items():
            outcome = await cells.run(job(request, (code, [("f", [3])], False, False)))
            frames = read_frames(outcome.contents[0], 1).frames
            has_run = frames and frames[-1].run == 0
            said[name] = frames[-1].body.decode() if has_run else outcome.reply.ending
        said["replaced"] = cells.num_replaced
        print(json.dumps(said), flush=True)  # noqa: T201  the test reads it
        if "stay" in sys.argv:
            await asyncio.to_thread(sys.stdin.read)


asyncio.run(main())
