"""Make a fault of each changed line of some packages and see whether a test finds it.

python -m benchmarks.mutants [--since REV] [--limit N] [--seed N] [--recorded] [PATH ...]
PATH: files or folders below async_rl/ (default: buffer, weights, training). --since: only lines
that changed since this revision. --limit: a random sample of this size.

First the tests of these packages run once, with a record of the lines that each test reaches
(build/mutants/; kept until a file changes, or with --recorded). Then each fault runs in a fork of
a process that has imported them, with the tests that reach its line, quickest first. Survivors are
printed; those in mutants.toml, with the reason why they change nothing that is visible, do
not count. Ends with 1 if more than a tenth survives.

No fault is made of a named limit, of texts for people and types, of `strict=True` (an assertion),
of what runs only as a separate program, and of `<` against `<=` between readings of a clock.
"""

import argparse
import ast
import contextlib
import functools
import hashlib
import importlib
import itertools
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from benchmarks.planting import PRODUCT, Planter, module_name, replace_functions

ROOT = PRODUCT.parent
RECORD = ROOT / "build" / "mutants"
Recorded = dict[str, tuple[float, dict[str, list[int]]]]
"""Seconds and lines by file of each test."""
PACKAGES = ("buffer", "weights", "training")
TESTS = (
    "buffer",
    "weights",
    "training",
    "world",
    "api",
    "config/test_preflight.py",
    "learner/test_compiling.py",
    "learner/test_families.py",
    "learner/test_lora.py",
    "learner/test_process_group.py",
    "learner/test_segments.py",
    "rollouts/test_generator_groups.py",
    "service/test_training.py",
    "view/test_pages.py",
)
"""Below tests/: those that reach the packages in their own process."""
PYTEST = (sys.executable, "-m", "pytest", "-p", "benchmarks.mutants")
MOST_SURVIVORS = 0.1
LONGEST_S = 240
PLANTED = "ASYNC_RL_PLANTED_FAULT"
"""The variable with a file and its source, for a fault outside of functions."""
if PLANTED in os.environ:
    # At the import of this plug-in: the conftest of a folder imports the product before any hook.
    sys.meta_path.insert(0, Planter(*json.loads(os.environ[PLANTED])))
LONGEST_TEST_S = 60
"""A test that waits for ever because of the fault ends after this time."""
_OTHER_COMPARISON = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OTHER_NAME = {"max": "min", "min": "max", "any": "all", "all": "any"}
_OTHER_SQL = (
    (">=", ">"),
    ("<=", "<"),
    (" > ", " >= "),
    (" < ", " <= "),
    (">:", ">=:"),
    ("<:", "<=:"),
    (" AND ", " OR "),
    (" OR ", " AND "),
    ("max(", "min("),
    ("!=", "="),
    (" NOT IN ", " IN "),
    (" DESC", ""),
)
_SQL = re.compile(r"\b(SELECT|UPDATE|DELETE|INSERT|WHERE|ORDER BY)\b")
_LOGS = re.compile(r"\b_?log\.(debug|info|warning|error)\(")


@dataclass(frozen=True)
class Fault:
    """lines: of the statement; name: that it defines in its module, or that its class has; text:
    the line of the changed node; old, new: its text.
    """

    file: str
    lines: range
    name: str
    text: str
    old: str
    new: str
    source: str

    @property
    def what(self) -> str:
        return f"{self.file}:{self.lines[0]}  {self._change}"

    @property
    def key(self) -> str:
        return f"{self.file}: {self.text}: {self._change}"

    @property
    def _change(self) -> str:
        # A long text, such as SQL, is cut around the change.
        pairs = enumerate(zip(self.old, self.new, strict=False))
        begin = max(next((at for at, (a, b) in pairs if a != b), 0) - 40, 0)
        old, new = (_one_line(text[begin:]) for text in (self.old, self.new))
        return f"{old}  ->  {new}"


# ---- faults


def faults_of(file: str, changed: set[int] | None) -> Iterator[Fault]:
    """Yield the faults of a file. changed: line numbers; None for all."""
    source = (PRODUCT / file).read_text()
    tree = ast.parse(source)
    # The last lines of a script run in a separate process.
    tops = [top for top in tree.body if not ast.unparse(top).startswith("if __name__ ==")]
    pairs = [(top, node) for top in tops for node in ast.walk(top)]
    for top, statement in pairs:
        if not isinstance(statement, ast.stmt) or _is_skipped(statement, source):
            continue
        for node, new in _changes(statement):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if changed is not None and not changed.intersection(lines):
                continue
            begin, end = _offset(source, node.lineno, node.col_offset), _end(source, node)
            mutated = source[:begin] + new + source[end:]
            try:
                compile(mutated, file, "exec")
            except SyntaxError:
                continue
            whole = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
            text = source.split("\n")[node.lineno - 1].strip()
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            old = f"({node.value!r})" if is_text else source[begin:end]
            yield Fault(file, whole, _name_of(top), text, old, new, mutated)


def _is_skipped(statement: ast.stmt, source: str) -> bool:
    # A limit with a name, such as a size or a number of seconds, is a choice and not a fact.
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        name = statement.targets[0].id
        if name.isupper() and not _SQL.search(ast.get_source_segment(source, statement) or ""):
            return True
    # The flags of a class, such as frozen, are a part of its type.
    if isinstance(statement, ast.Assert | ast.Import | ast.ImportFrom | ast.Raise | ast.ClassDef):
        return True
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return True
    text = ast.get_source_segment(source, statement) or ""
    return isinstance(statement, ast.Expr) and _LOGS.search(text) is not None


def _changes(statement: ast.stmt) -> Iterator[tuple[Any, str]]:
    """Yield (node, its new text) for the statement without the statements in its body."""
    if isinstance(statement, ast.Expr):
        yield statement, "pass"
    if isinstance(statement, ast.Assign | ast.AugAssign) and isinstance(
        _target(statement), ast.Attribute | ast.Subscript
    ):
        yield statement, "pass"
    if isinstance(statement, ast.Delete | ast.Continue | ast.Break):
        yield statement, "pass"
    # The other comparison says the same.
    if isinstance(statement, ast.If | ast.While) and not isinstance(statement.test, ast.Compare):
        yield statement.test, f"not ({ast.unparse(statement.test)})"
    for node in _expressions(statement):
        yield from _changed(node)


def _target(statement: ast.Assign | ast.AugAssign) -> ast.expr:
    return statement.targets[0] if isinstance(statement, ast.Assign) else statement.target


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Every expression in the statement that is neither text for people nor a type."""
    queue: list[ast.AST] = [statement]
    while queue:
        node = queue.pop()
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.stmt | ast.JoinedStr | ast.ExceptHandler):
                    continue
                match child:
                    case ast.keyword(arg="strict", value=ast.Constant(value=True)):
                        continue  # of zip: an assertion
                if isinstance(child, ast.expr):
                    yield child
                if isinstance(child, ast.AST):
                    queue.append(child)


def _changed(node: ast.expr) -> Iterator[tuple[ast.expr, str]]:
    match node:
        # No two readings of a clock are equal.
        case ast.Compare(ops=[ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE()]) if (
            "monotonic()" in ast.unparse(node)
        ):
            pass
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OTHER_COMPARISON:
            other = ast.Compare(left, [_OTHER_COMPARISON[type(op)]()], [right])
            yield node, f"({ast.unparse(other)})"
        case ast.BoolOp(op=op, values=values):
            other_op = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield node, f"({ast.unparse(ast.BoolOp(other_op, values))})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, f"({ast.unparse(operand)})"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield node, f"({ast.unparse(ast.IfExp(test, orelse, body))})"
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            swapped = ast.Sub() if isinstance(op, ast.Add) else ast.Add()
            yield node, f"({ast.unparse(ast.BinOp(left, swapped, right))})"
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int(value)):
            yield node, str(value + 1)
        case ast.Constant(value=str(text)) if _SQL.search(text):
            for old, new in _OTHER_SQL:
                if old in text:
                    yield node, f"({text.replace(old, new, 1)!r})"
        case ast.Call(func=ast.Name(id=name) as func) if name in _OTHER_NAME:
            yield func, _OTHER_NAME[name]


def _offset(source: str, line: int, column: int) -> int:
    """The position in the text of a line and a column in bytes."""
    lines = source.split("\n")
    before = sum(len(text) + 1 for text in lines[: line - 1])
    return before + len(lines[line - 1].encode()[:column].decode())


def _end(source: str, node: Any) -> int:
    return _offset(source, node.end_lineno, node.end_col_offset)


def changed_lines(since: str) -> dict[str, set[int]]:
    """Return the lines below async_rl/ that were added or changed since a revision, by file."""
    diff = subprocess.run(
        ["git", "diff", "-U0", since, "--", "async_rl"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found: dict[str, set[int]] = defaultdict(set)
    file = ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            file = line.removeprefix("+++ b/async_rl/")
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, number = int(hunk[1]), int(hunk[2] or 1)
            found[file].update(range(first, first + number))
    return found


# ---- which tests reach which lines


class Recorder:
    """A plug-in of pytest: the lines of the product that each test reaches, and its seconds."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._prefixes = tuple(str(PRODUCT / package) + "/" for package in PACKAGES)
        # The lines that the test has not reached, by the id of their code: codes are compared by
        # their content, which is slow. Code of other packages has none.
        self._left: dict[int, tuple[CodeType, set[int]]] = {}
        self._failed: set[str] = set()
        self.tests: Recorded = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._left = {}
        started_s = time.perf_counter()
        threading.settrace(self._call)
        sys.settrace(self._call)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            seconds = time.perf_counter() - started_s
            reached: dict[str, set[int]] = defaultdict(set)
            for code, left in list(self._left.values()):
                if code.co_filename.startswith(self._prefixes):
                    name = code.co_filename.removeprefix(str(PRODUCT) + "/")
                    reached[name] |= _lines_of(code) - left
            if reached:
                self.tests[item.nodeid] = seconds, {k: sorted(v) for k, v in reached.items()}

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if id(code) not in self._left:
            is_product = code.co_filename.startswith(self._prefixes)
            self._left[id(code)] = code, _lines_of(code) if is_product else set()
        # A function whose lines have all been reached runs at its full speed.
        return self._line(frame, event, argument) if self._left[id(code)][1] else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        left = self._left[id(frame.f_code)][1]
        left.discard(frame.f_lineno)
        return self._line if left else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        # A test that fails without a fault would find every one.
        for name in self._failed & self.tests.keys():
            del self.tests[name]
        self._target.write_text(json.dumps(self.tests))


def _lines_of(code: CodeType) -> set[int]:
    return {line for _, _, line in code.co_lines() if line is not None}


def pytest_configure(config: pytest.Config) -> None:
    """Recording, in each process of pytest-xdist that runs tests."""
    worker = getattr(config, "workerinput", {}).get("workerid", "")
    if worker:
        config.pluginmanager.register(Recorder(RECORD / f"{worker}.json"))


def _state() -> str:
    """A digest of the product and the tests."""
    files = {*PRODUCT.rglob("*.py"), *(ROOT / "tests").rglob("*.py")}
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def recorded(*, is_kept: bool = False) -> Recorded:
    """Return (seconds, lines by file) of each test; runs the tests if something has changed."""
    state = RECORD / "state"
    if not state.exists() or (state.read_text() != _state() and not is_kept):
        RECORD.mkdir(parents=True, exist_ok=True)
        # A record of other lines would take the place of this one for the same tests.
        for earlier in RECORD.glob("gw*.json"):
            earlier.unlink()
        folders = [f"tests/{name}" for name in TESTS]
        command = [*PYTEST, "-q", "-n", "2", *folders]
        subprocess.run(command, cwd=ROOT, env=_environment(), check=False)
        state.write_text(_state())
    tests: Recorded = {}
    for path in sorted(RECORD.glob("gw*.json")):
        tests |= json.loads(path.read_text())
    return tests


def _environment() -> dict[str, str]:
    quiet = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return os.environ | quiet | {"PYTHONPATH": str(ROOT)}


# ---- one fault


def tests_of(fault: Fault, tests: Recorded, most_s: float) -> list[str]:
    """Return the tests that reach the fault, the quickest first, as many as fit
    into the seconds: thousands reach a line of an inner loop.
    """
    reaching = [
        (seconds, name)
        for name, (seconds, lines) in tests.items()
        if any(line in fault.lines for line in lines.get(fault.file, ()))
    ]
    # A statement of the module runs at its import, and acts where its name is used.
    if not reaching:
        used = _lines_with(fault.name)
        reaching = [
            (seconds, name)
            for name, (seconds, lines) in tests.items()
            if any(not used[file].isdisjoint(lines[file]) for file in used.keys() & lines.keys())
        ]
    if not reaching:
        reaching = [
            (seconds, name) for name, (seconds, lines) in tests.items() if fault.file in lines
        ]
    chosen: list[str] = []
    left_s = most_s
    for seconds, name in sorted(reaching):
        left_s -= seconds
        if chosen and left_s < 0:
            break
        chosen.append(name)
    return chosen


def _name_of(top: ast.stmt) -> str:
    match top:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name
    return ""


@functools.cache
def _lines_with(name: str) -> dict[str, set[int]]:
    """The lines of functions, by file, that use a name of a module or one that is made of it."""
    found: dict[str, set[int]] = defaultdict(set)
    for path in (path for package in PACKAGES for path in (PRODUCT / package).rglob("*.py")):
        for top in ast.parse(path.read_text()).body:
            nodes = [node for node in ast.walk(top) if isinstance(node, ast.Name | ast.Attribute)]
            names = [node.id if isinstance(node, ast.Name) else node.attr for node in nodes]
            own = _name_of(top)
            lines = {node.lineno for node, it in zip(nodes, names, strict=True) if it == name}
            found[str(path.relative_to(PRODUCT))] |= lines
            if lines and own != name and isinstance(top, ast.Assign | ast.AnnAssign):
                for file, more in _lines_with(own).items():
                    found[file] |= more
    return found


class Hunter:
    """A plug-in of pytest: instead of the tests, a fork for each fault, which runs those that reach
    it. survivors: faults without a test that fails.
    """

    def __init__(self, faults: Sequence[Fault], tests: Recorded, most_s: float) -> None:
        self._faults, self._tests, self._most_s = faults, tests, most_s
        self._has_failed = False
        self.survivors: list[Fault] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._has_failed |= report.failed

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        for number, fault in enumerate(self._faults, 1):
            reaching = [items[n] for n in tests_of(fault, self._tests, self._most_s) if n in items]
            whole = replace(fault, source=(PRODUCT / fault.file).read_text())
            if number == 1 and self._is_found(whole, reaching):
                raise SystemExit("the tests fail without a fault; run one of them with pytest")
            if not self._is_found(fault, reaching):
                self.survivors.append(fault)
                why = f"{len(reaching)} tests pass" if reaching else "no test reaches it"
                _say(f"{fault.what}   ({why})")
            elif number % 20 == 0:
                _say(f"... {number} of {len(self._faults)}, {len(self.survivors)} survive")
        return True

    def _is_found(self, fault: Fault, items: Sequence[pytest.Item]) -> bool:
        """Run the tests in a fork with the fault. They are imported, which saves five seconds."""
        with tempfile.TemporaryDirectory() as folder:
            child = os.fork()
            if child == 0:
                # A fault may break pytest as well.
                with contextlib.suppress(BaseException):
                    self._run(fault, items, Path(folder))
                    os._exit(int(self._has_failed))
                os._exit(2)
            return _code_of(child) != 0

    def _run(self, fault: Fault, items: Sequence[pytest.Item], folder: Path) -> None:
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        for item in items[:1]:
            item.config.pluginmanager.unregister(name="terminalreporter")
        module = importlib.import_module(module_name(fault.file))
        if not replace_functions(module, fault.source):
            names = [item.nodeid for item in items]
            command = [*PYTEST, "-x", "-q", *names]
            planted = os.environ | {PLANTED: json.dumps([fault.file, fault.source])}
            self._has_failed = subprocess.run(command, cwd=ROOT, env=planted).returncode != 0
            return
        for item, next_item in itertools.zip_longest(items, items[1:]):
            item.config._tmp_path_factory._basetemp = folder  # type: ignore[union-attr]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
            if self._has_failed:
                break


def _code_of(child: int) -> int:
    """Wait for the end of a fork. A signal ends it, also at the deadline: the fault loops."""
    process = os.pidfd_open(child)
    try:
        if not select.select([process], [], [], LONGEST_S)[0]:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    finally:
        os.close(process)
    return os.waitstatus_to_exitcode(status)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)[:100]


def main() -> int:
    """Make faults and hunt them; return 1 if more than a tenth survives."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", default=PACKAGES, help="below async_rl/")
    parser.add_argument("--since", help="a revision of git")
    parser.add_argument("--limit", type=int, help="the size of a random sample")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--recorded", action="store_true", help="keep the record of an older state")
    parser.add_argument("--most-s", type=float, default=60.0, help="of tests for one fault")
    arguments = parser.parse_args()
    changed = None if arguments.since is None else changed_lines(arguments.since)
    faults: list[Fault] = []
    for path in (PRODUCT / name for name in arguments.paths):
        for each in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            file = str(each.relative_to(PRODUCT))
            if changed is None or file in changed:
                faults += faults_of(file, None if changed is None else changed[file])
    rng = random.Random(arguments.seed)
    if arguments.limit is not None and arguments.limit < len(faults):
        faults = rng.sample(faults, arguments.limit)
    equal = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())
    faults = [fault for fault in faults if fault.key not in equal]
    tests = recorded(is_kept=arguments.recorded)
    os.environ.update(_environment())
    hunter = Hunter(faults, tests, arguments.most_s)
    modules = {n.partition("::")[0] for f in faults for n in tests_of(f, tests, arguments.most_s)}
    options = ["-q", "-p", "no:cacheprovider", f"--timeout={LONGEST_TEST_S}"]
    code = pytest.main([*options, *sorted(modules)], plugins=[hunter])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(f"pytest ended with {code}")
    share = len(hunter.survivors) / max(1, len(faults))
    _say(f"{len(faults)} faults, {len(hunter.survivors)} survive ({share:.0%})")
    return int(share > MOST_SURVIVORS)


if __name__ == "__main__":
    sys.exit(main())
