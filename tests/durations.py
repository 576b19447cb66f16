"""The seconds of each test module: `--check-durations` fails a module that has grown.

Each run with the option writes what it measured to build/durations.toml. `python
tests/durations.py [MODULE ...]` copies that, or those modules of it, to tests/durations.toml, which
holds the seconds of two quiet cores.

A machine may be busier than it was at the record, so a module is compared with the other ones: its
limit is 1.3 times its recorded seconds times the median of (measured / recorded) over all modules,
and it must exceed what it should have taken by LEAST_S as well. What exceeds its limit is run a
second time, alone; the shorter time counts, so that a neighbor that took the processor fails
nothing. Another kind of processor makes some modules slower than others, so only the kind of the
record is compared.
"""

import math
import os
import re
import statistics
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

GROWTH = 1.3
LEAST_S = 20.0
"""Below that a module's seconds vary by imports and servers that it is the first to need; a new
module that takes longer has to be recorded.
"""
RATED_S = 3.0
"""Modules that take less do not count for the speed of the machine, for the same reason."""
RECORD = Path(__file__).with_name("durations.toml")
MEASURED = Path("build", "durations.toml")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--check-durations", action="store_true", help=__doc__)


def pytest_configure(config: pytest.Config) -> None:
    # Workers report to the process that leads them.
    if config.getoption("check_durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(config.rootpath))


class Durations:
    """Adds up the durations of one run and compares them with the record."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seconds: Counter[str] = Counter()
        self._said: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    # After unsteady.py, which may turn the run green.
    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        seconds = dict(self._seconds)
        write(self._root / MEASURED, seconds)
        recorded = read(RECORD)
        if session.exitstatus != pytest.ExitCode.OK or not recorded:
            return
        factor = slowness(seconds, recorded)
        for module in grown(seconds, recorded, factor=factor):
            seconds[module] = min(seconds[module], self._seconds_alone(module))
        self._said = [
            f"{module} took {seconds[module]:.0f} s instead of"
            f" {factor * recorded.get(module, 0.0):.0f} s (recorded seconds times {factor:.2f})"
            for module in grown(seconds, recorded, factor=factor)
        ]
        if self._said:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._said:
            terminalreporter.section("modules that have grown; make them faster, or record why not")
            terminalreporter.write_line("\n".join(self._said))
            terminalreporter.write_line("python tests/durations.py MODULE records a module")

    def _seconds_alone(self, module: str) -> float:
        started_s = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", module]
        done = subprocess.run(command, cwd=self._root, capture_output=True, check=False)
        # A module that fails early says nothing about its time.
        return time.monotonic() - started_s if done.returncode == 0 else math.inf


def slowness(seconds: Mapping[str, float], recorded: Mapping[str, float]) -> float:
    """Return how many times slower this machine is than the one of the record; at least 1, because
    a faster one does not make a module faster that waits.
    """
    ratios = [
        seconds[module] / recorded[module]
        for module in seconds.keys() & recorded.keys()
        if recorded[module] >= RATED_S
    ]
    return max(1.0, statistics.median(ratios)) if ratios else 1.0


def grown(
    seconds: Mapping[str, float], recorded: Mapping[str, float], *, factor: float
) -> list[str]:
    """Return the modules above their limit, and new ones that are long."""
    found = []
    for module, took_s in sorted(seconds.items()):
        expected_s = recorded.get(module, 0.0) * factor
        if took_s > GROWTH * expected_s and took_s > expected_s + LEAST_S * factor:
            found.append(module)
    return found


def read(path: Path) -> dict[str, float]:
    """Return the seconds by module; none if they are of another kind of processor."""
    known: dict[str, Any] = tomllib.loads(path.read_text()) if path.is_file() else {"processor": ""}
    return dict(known["seconds"]) if known["processor"] == processor() else {}


def processor() -> str:
    """Return the kind of this machine's processor: its name and its widest vectors."""
    text = Path("/proc/cpuinfo").read_text()
    name = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    widest = next((word for word in ("avx512f", "avx2") if f" {word} " in text), "no AVX2")
    return f"{name[1] if name else 'unknown'}, {widest}, {os.cpu_count()} cores"


def write(path: Path, seconds: Mapping[str, float]) -> None:
    """Write the seconds by module."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = "".join(f'"{module}" = {took_s:.1f}\n' for module, took_s in sorted(seconds.items()))
    path.write_text(
        "# Seconds of each module on two quiet cores (tests/durations.py).\n"
        f'processor = "{processor()}"\n\n[seconds]\n{rows}'
    )


def main() -> None:
    """Record the last run, or some modules of it."""
    measured = read(MEASURED)
    names = sys.argv[1:] or list(measured)
    known = read(RECORD) if sys.argv[1:] else {}
    write(RECORD, known | {name: measured[name] for name in names})


if __name__ == "__main__":
    main()
