"""Runs one qualification in a separate process: vLLM and torch change their process for good, and
a process that hangs or crashes is a verdict.

    python -m benchmarks.qualification.running NAME OUT SCRATCH SETTING...
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from async_rl.composition.overrides import with_defaults
from async_rl.core.os import die_with_parent
from async_rl.supervision.child import errors_in
from benchmarks.qualification.catalogue import Qualification, qualifications
from benchmarks.qualification.report import Result, Verdict

_REASON_LINES = 6
_REPOSITORY = Path(__file__).resolve().parents[2]
_GRACE_S = 5.0


def judge(
    entry: Qualification,
    settings: Sequence[str],
    *,
    skip: str,
    run: Callable[[list[str], float, Path], str] | None = None,
) -> Result:
    """Return the verdict of one qualification.

    skip: the reason to skip it, or empty. run: starts the process with a limit, its standard error
    in a file, and returns a problem or an empty string; tests give their own.
    """
    started_s = time.monotonic()
    numbers: dict[str, float] = {}
    reason = skip
    verdict: Verdict = "skipped"
    if not skip:
        with tempfile.TemporaryDirectory(prefix="async-rl-qualify-") as directory:
            scratch = Path(directory)
            out = scratch / "numbers.json"
            words = [entry.name, str(out), directory, *with_defaults(settings, entry.settings)]
            command = [sys.executable, "-m", __name__, *words]
            reason = (run or run_limited)(command, entry.limit_s, scratch / "errors")
            if not reason:
                numbers = msgspec.json.decode(out.read_bytes(), type=dict[str, float])
                broken = [limit for limit in entry.limits if not limit.is_kept(numbers)]
                reason = "; ".join(f"not {limit}" for limit in broken)
        verdict = "failed" if reason else "passed"
    return Result(
        name=entry.name,
        title=entry.title,
        verdict=verdict,
        reason=reason,
        limits=[str(limit) for limit in entry.limits],
        numbers=numbers,
        seconds=time.monotonic() - started_s,
    )


def run_limited(command: list[str], limit_s: float, errors: Path) -> str:
    """Run a command; returns why it failed, or an empty string. Past the limit all of its processes
    end.
    """
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            command,
            stdout=stderr,
            stderr=stderr,
            stdin=subprocess.DEVNULL,
            # This package is part of the repository, not of the installed project.
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(_REPOSITORY), *_searched()])},
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"it ran past its limit of {limit_s:g} s; {_last_lines(errors)}"
        finally:
            # Processes that it left behind, hanging ones too, would measure with the next one.
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE_S)
    # An engine process prints its cause long before the last lines.
    told = [*errors_in(errors).splitlines(), _last_lines(errors)]
    return f"exit code {code}: {' | '.join(map(str.strip, told))}" if code else ""


def _searched() -> list[str]:
    """Return the directories of PYTHONPATH: the project may be there and not be installed."""
    return list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))


def _last_lines(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-_REASON_LINES:])


def main(name: str, out: str, scratch: str, *settings: str) -> None:
    """Run the check of one qualification and write its numbers."""
    die_with_parent()
    [entry] = [entry for entry in qualifications() if entry.name == name]
    module, _, function = entry.check.partition(":")
    package = __spec__.parent if __spec__ is not None else ""
    check = vars(importlib.import_module(f"{package}.{module}"))[function]
    numbers = check(Path(scratch), list(settings))
    Path(out).write_bytes(msgspec.json.encode(numbers))


if __name__ == "__main__":
    main(*sys.argv[1:])
