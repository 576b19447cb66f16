"""Make a fault of each changed line of some packages and see whether a test finds it.

python tests/mutants.py [--since REV] [--limit N] [--seed N] [PATH ...]
PATH: files or folders below async_rl/ (default: buffer, weights, training). --since: only lines
that changed since this revision. --limit: a random sample of so many faults.

First the tests of these packages run once, with a record of the lines that each test reaches
(build/mutants/; kept until a file changes). Then each fault runs in a fork of this process, with
the tests that reach its line, quickest first. Survivors are printed; those in mutants.toml, with
the reason why they change nothing that anybody could see, do not count. Ends with 1 if more than a
tenth survives.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = ROOT / "async_rl"
RECORD = ROOT / "build" / "mutants"
PACKAGES = ("buffer", "weights", "training")
TESTS = (
    "buffer",
    "weights",
    "training",
    "world",
    "api",
    "config/test_preflight.py",
    "generation/test_device_block.py",
    "learner/test_lora.py",
    "learner/test_process_group.py",
    "learner/test_replaying.py",
    "view/test_pages.py",
)
"""Below tests/: those that reach the packages in their own process."""
MOST_SURVIVORS = 0.1
MOST_TESTS_S = 60.0
"""Tests of one fault, by their recorded seconds: thousands reach a line of an inner loop."""
LONGEST_S = 240
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
    """lines: of the statement; text: the line of the changed node; old, new: its text."""

    file: str
    lines: range
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
        # Of a long text, such as SQL, the part around the change.
        pairs = enumerate(zip(self.old, self.new, strict=False))
        begin = max(next((at for at, (a, b) in pairs if a != b), 0) - 40, 0)
        old, new = (_one_line(text[begin:]) for text in (self.old, self.new))
        return f"{old}  ->  {new}"


class Planter(importlib.abc.MetaPathFinder):
    """Imports one module of the product from another source."""

    def __init__(self, file: str, source: str) -> None:
        self._path = PRODUCT / file
        self._name = "async_rl." + file.removesuffix(".py").replace("/", ".")
        self._source = source

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> Any:
        if name != self._name:
            return None
        code = compile(self._source, str(self._path), "exec")

        class Loader(importlib.machinery.SourceFileLoader):
            def get_code(self, fullname: str) -> CodeType:
                return code

        return importlib.util.spec_from_loader(name, Loader(name, str(self._path)))


# ---- faults


def faults_of(file: str, changed: set[int] | None) -> Iterator[Fault]:
    """Yield the faults of a file. changed: line numbers; None for all."""
    source = (PRODUCT / file).read_text()
    tree = ast.parse(source)
    for statement in ast.walk(tree):
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
            yield Fault(file, whole, text, old, new, mutated)


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
                if isinstance(child, ast.expr):
                    yield child
                if isinstance(child, ast.AST):
                    queue.append(child)


def _changed(node: ast.expr) -> Iterator[tuple[ast.expr, str]]:
    match node:
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
        self.tests: dict[str, tuple[float, dict[str, list[int]]]] = {}

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
            threading.settrace(None)  # type: ignore[arg-type]
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
        packages = [
            n for n, m in sys.modules.items() if "site-packages" in (vars(m).get("__file__") or "")
        ]
        (RECORD / "packages.json").write_text(json.dumps(packages))


def _lines_of(code: CodeType) -> set[int]:
    return {line for _, _, line in code.co_lines() if line is not None}


def pytest_configure(config: pytest.Config) -> None:
    """Recording, in each process of pytest-xdist that runs tests."""
    worker = getattr(config, "workerinput", {}).get("workerid", "")
    if worker:
        config.pluginmanager.register(Recorder(RECORD / f"{worker}.json"))


def _state() -> str:
    """A digest of the product and the tests."""
    files = {*PRODUCT.rglob("*.py"), *(ROOT / "tests").rglob("*.py")} - {Path(__file__)}
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def recorded() -> dict[str, tuple[float, dict[str, list[int]]]]:
    """Return (seconds, lines by file) of each test; runs the tests if something has changed."""
    state = RECORD / "state"
    if not state.exists() or state.read_text() != _state():
        RECORD.mkdir(parents=True, exist_ok=True)
        # A record of other lines would take the place of this one for the same tests.
        for earlier in RECORD.glob("gw*.json"):
            earlier.unlink()
        folders = [f"tests/{name}" for name in TESTS]
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "mutants", *folders]
        subprocess.run(command, cwd=ROOT, env=_environment(), check=False)
        state.write_text(_state())
    tests: dict[str, tuple[float, dict[str, list[int]]]] = {}
    for path in sorted(RECORD.glob("gw*.json")):
        tests |= json.loads(path.read_text())
    return tests


def _environment() -> dict[str, str]:
    quiet = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return os.environ | quiet | {"PYTHONPATH": str(ROOT / "tests")}


def import_packages() -> None:
    """Import what the tests import besides the product: each fork has it then, which saves five of
    its eight seconds.
    """
    for name in json.loads((RECORD / "packages.json").read_text()):
        # Some can only be imported by their package.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


# ---- one fault


def tests_of(fault: Fault, tests: dict[str, tuple[float, dict[str, list[int]]]]) -> list[str]:
    """Return the tests that reach the fault, the quickest first."""
    reaching = [
        (seconds, name)
        for name, (seconds, lines) in tests.items()
        if any(line in fault.lines for line in lines.get(fault.file, ()))
    ]
    # A statement of the module runs at its import.
    if not reaching:
        reaching = [
            (seconds, name) for name, (seconds, lines) in tests.items() if fault.file in lines
        ]
    chosen: list[str] = []
    left_s = MOST_TESTS_S
    for seconds, name in sorted(reaching):
        left_s -= seconds
        if left_s < 0:
            break
        chosen.append(name)
    return chosen


def is_found(fault: Fault, tests: list[str]) -> bool:
    """Run the tests in a fork with the fault."""
    child = os.fork()
    if child == 0:
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        sys.meta_path.insert(0, Planter(fault.file, fault.source))
        # Packages of pytest are here already (`import_packages`), and a warning would be an error.
        quiet = "ignore::pytest.PytestAssertRewriteWarning"
        options = ["-x", "-q", "-p", "no:cacheprovider", "-W", quiet]
        options.append(f"--timeout={LONGEST_TEST_S}")
        code: int = pytest.main([*options, *tests])
        os._exit(code)
    process = os.pidfd_open(child)
    try:
        if not select.select([process], [], [], LONGEST_S)[0]:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    finally:
        os.close(process)
    code = os.waitstatus_to_exitcode(status)
    # A signal ends it, also at the deadline: the fault loops. 2: a module could not be imported.
    if code in (0, 1, 2) or code < 0:
        return code != 0
    raise SystemExit(f"pytest ended with {code} and ran no test: {' '.join(tests[:3])}")


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
    parser.add_argument("--limit", type=int, help="a sample of so many faults")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
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
    equal = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())
    faults = [fault for fault in faults if fault.key not in equal]
    tests = recorded()
    os.environ.update(_environment())
    # Compiled once, whatever the environment says. A fault is compiled in its fork and not kept.
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(RECORD / "pycache")
    import_packages()
    survivors = 0
    for number, fault in enumerate(faults, 1):
        reaching = tests_of(fault, tests)
        whole = replace(fault, source=(PRODUCT / fault.file).read_text())
        if number == 1 and reaching and is_found(whole, reaching):
            raise SystemExit("the tests fail without a fault; run one of them with pytest")
        if not reaching or not is_found(fault, reaching):
            survivors += 1
            why = f"{len(reaching)} tests pass" if reaching else "no test reaches it"
            _say(f"{fault.what}   ({why})")
        elif number % 20 == 0:
            _say(f"... {number} of {len(faults)}, {survivors} survive")
    share = survivors / max(1, len(faults))
    _say(f"{len(faults)} faults, {survivors} survive ({share:.0%})")
    return int(share > MOST_SURVIVORS)


if __name__ == "__main__":
    sys.exit(main())
