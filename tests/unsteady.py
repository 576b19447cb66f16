"""A test that fails is run once more, alone, at the end of the same command.

If it passes then, the run is green and lists the test as unsteady with what it said when it failed:
a busy machine must not hide which change broke something. A test of tests/unsteady.toml has been
unsteady before, so it fails: it has to be repaired.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MOST = 8
"""More failures have a common cause, which running them again would only delay."""
LIST = Path(__file__).with_name("unsteady.toml")


def known() -> set[str]:
    """The tests that were unsteady once."""
    return set(tomllib.loads(LIST.read_text())["tests"]) if LIST.is_file() else set()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Repeat what failed, in the process that leads the workers."""
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    if not session.config.getoption("numprocesses", None) or reporter is None:
        return
    failed = {report.nodeid for report in _failures(reporter.stats)}
    if not failed or len(failed) > MOST or failed & known():
        return
    unsteady = {nodeid for nodeid in failed if _passes_alone(nodeid, session.config.rootpath)}
    for kind in ("failed", "error"):
        reports = reporter.stats.get(kind, [])
        left = [report for report in reports if report.nodeid not in unsteady]
        repeated = [report for report in reports if report.nodeid in unsteady]
        reporter.stats[kind] = left
        if not left:
            reporter.stats.pop(kind)
        if repeated:
            reporter.stats.setdefault("unsteady", []).extend(repeated)
    if unsteady == failed:
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show what the unsteady tests said."""
    reports = terminalreporter.stats.get("unsteady", [])
    if reports:
        terminalreporter.section(
            "unsteady: passed when run again alone; add them to tests/unsteady.toml"
        )
    for report in reports:
        terminalreporter.write_line(f"{report.nodeid} failed first:")
        terminalreporter.write_line(report.longreprtext)


def _failures(stats: dict[str, list[Any]]) -> Iterator[Any]:
    for kind in ("failed", "error"):
        yield from stats.get(kind, [])


def _passes_alone(nodeid: str, root: Path) -> bool:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", nodeid]
    return subprocess.run(command, cwd=root, env=environment, check=False).returncode == 0
