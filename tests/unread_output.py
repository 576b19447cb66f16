"""Programs whose standard output has no reader, as after `async-rl launch ... | head`."""

import subprocess
import sys


def run_unread(program: str) -> tuple[int, bytes]:
    """Run the program, which must first read a line, with its output closed; return its exit code
    and its errors.
    """
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, errors = process.communicate(b"go on\n", timeout=60)
    return process.returncode, errors
