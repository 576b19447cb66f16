"""`--repeat-failed`: a test that fails is run once more, alone, at the end of the same command.

If it passes then, the run is green. The test is listed as unsteady with both outputs and written
into tests/unsteady.toml. A test of that file has been unsteady before, so its failure counts.
"""

import json
import os
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

MOST_REPEATED = 3
"""So many modules that fail again have a common cause. The run is red by the first of them; each
further repetition only delays its end.
"""
LIST = "unsteady.toml"
_KINDS = ("failed", "error")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--repeat-failed", action="store_true", help=__doc__)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Repeat what failed, in the process that leads the workers."""
    config = session.config
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    if not config.getoption("repeat_failed") or reporter is None or hasattr(config, "workerinput"):
        return
    # An interrupted run has not shown that the rest passes.
    if session.exitstatus != pytest.ExitCode.TESTS_FAILED:
        return
    listed = Path(__file__).with_name(LIST)
    failed = {report.nodeid for report in _failures(reporter.stats)}
    said = _repeat(failed - _known(listed), config.rootpath)
    for kind in _KINDS:
        reports = reporter.stats.pop(kind, [])
        if left := [report for report in reports if report.nodeid not in said]:
            reporter.stats[kind] = left
        if repeated := [report for report in reports if report.nodeid in said]:
            reporter.stats.setdefault("unsteady", []).extend(repeated)
    for report in reporter.stats.get("unsteady", []):
        report.second_output = said[report.nodeid]
    _write(listed, _known(listed) | said.keys())
    if said.keys() == failed:
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show what the unsteady tests said both times."""
    reports = terminalreporter.stats.get("unsteady", [])
    if reports:
        terminalreporter.section(f"unsteady: passed when run again alone; now in tests/{LIST}")
    for report in reports:
        terminalreporter.write_line(f"{report.nodeid} failed first:")
        terminalreporter.write_line(report.longreprtext)
        for title, text in report.sections:
            terminalreporter.write_line(f"{title}\n{text}")
        terminalreporter.write_line(f"{report.nodeid} passed then:")
        terminalreporter.write_line(report.second_output)


def _failures(stats: dict[str, list[Any]]) -> Iterator[Any]:
    for kind in _KINDS:
        yield from stats.get(kind, [])


def _repeat(nodeids: Iterable[str], root: Path) -> dict[str, str]:
    """Return the output of each test that passes now, by its id. Failed tests of one module are
    run together: they may share a run that takes minutes.
    """
    modules: defaultdict[str, list[str]] = defaultdict(list)
    for nodeid in sorted(nodeids):
        modules[nodeid.partition("::")[0]].append(nodeid)
    passed: dict[str, str] = {}
    num_failed = 0
    for tests in modules.values():
        output = _run_alone(tests, root)
        lines = output.splitlines()
        now = {
            test
            for test in tests
            if any(line == f"PASSED {test}" for line in lines)
            and not any(line.startswith((f"ERROR {test}", f"FAILED {test}")) for line in lines)
        }
        passed |= dict.fromkeys(now, output)
        num_failed += len(now) < len(tests)
        if num_failed == MOST_REPEATED:
            break
    return passed


def _run_alone(nodeids: list[str], root: Path) -> str:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    # Wide, or the names of tests in the summary are cut.
    environment["COLUMNS"] = "1000"
    command = [sys.executable, "-m", "pytest", "-n", "0", "-rA", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, *nodeids],
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    ).stdout


def _known(listed: Path) -> set[str]:
    """The tests that were unsteady once."""
    return set(tomllib.loads(listed.read_text())["tests"]) if listed.is_file() else set()


def _write(listed: Path, tests: set[str]) -> None:
    if tests != _known(listed):
        head, _, _ = listed.read_text().partition("tests =")
        rows = "".join(f"    {json.dumps(test)},\n" for test in sorted(tests))
        listed.write_text(f"{head}tests = [\n{rows}]\n")
