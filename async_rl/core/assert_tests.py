"""The requirements of an assert test on a program, read from its code without running it. Pure.

`Asked` has the names that the program must define. Its fault is the reason why a test cannot
judge any program: it does not compile, it checks nothing, or it is written in a form that the judge
(sandbox/judge.py) does not run. Such a test would otherwise fail or pass every program.
"""

from __future__ import annotations

import ast
import builtins
import functools
import symtable
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple

from async_rl.core.errors import DataError
from async_rl.core.frozen import frozen
from async_rl.core.types import AssertTest, CallTest, CodeProblem

# No functions: tests of `gcd` or `reduce` call the functions of the program.
OFFERED = {
    "collections": "import collections",
    "copy": "import copy",
    "functools": "import functools",
    "itertools": "import itertools",
    "json": "import json",
    "math": "import math",
    "operator": "import operator",
    "random": "import random",
    "re": "import re",
    "string": "import string",
    "sys": "import sys",
    "Counter": "from collections import Counter",
    "OrderedDict": "from collections import OrderedDict",
    "defaultdict": "from collections import defaultdict",
    "deque": "from collections import deque",
    "Decimal": "from decimal import Decimal",
    "Fraction": "from fractions import Fraction",
}
"""The import statement of each module and type that a test may use without importing it."""
_BUILTINS = frozenset(vars(builtins))
_SOLUTION = "solution"
# A test with these marks may pass without its code.
_MARKS = frozenset({"skip", "skipif", "xfail"})
# They change the test's process only, or give the program an object of the test.
_ELSEWHERE = {
    "patch": {"dict"},
    "monkeypatch": {"chdir", "delenv", "delitem", "setenv", "setitem", "syspath_prepend"},
}
_PREPARATIONS = frozenset(
    f"{verb}_{scope}"
    for verb in ("setup", "teardown")
    for scope in ("class", "function", "method", "module")
)


class Call(NamedTuple):
    """One call of the program's function on plain arguments, and the value that is right. types:
    how they are compared (sandbox/comparison.py).
    """

    function: str
    args: Sequence[Any]
    expected: Any
    types: str


@frozen
class Asked:
    """What a test asks of the program.

    names: global names that setup and test use but do not bind, builtins and OFFERED excepted, and
    those that the row says the program defines (`own`); imports: the statements of OFFERED that the
    test needs; fault: the reason why it cannot judge any program; calls: the whole test if it has
    only calls with expected values; needs_pytest: it has fixtures, parameters or setup methods.
    """

    names: frozenset[str] = frozenset()
    own: frozenset[str] = frozenset()
    imports: str = ""
    fault: str = ""
    calls: tuple[Call, ...] = ()
    needs_pytest: bool = False


# A data set repeats its setup, and a request its test: each is read once.
@functools.lru_cache(maxsize=4096)
def asked_by(setup: str, code: str, own: frozenset[str] = frozenset()) -> Asked:
    """Read a test with its setup. own: names that the row says the program defines."""
    try:
        with warnings.catch_warnings():
            # A test of a data set may have an invalid escape, which the verifier need not report.
            warnings.simplefilter("ignore")
            modules = [ast.parse(text) for text in (setup, code)]
            calls = () if modules[0].body else _calls_of(modules[1], own)
            if calls:
                # Most tests of MBPP: the rest would add a fifth to the time of a verdict.
                names = frozenset(call.function for call in calls)
                return Asked(names=names, own=own & names, calls=calls)
            tables = [symtable.symtable(text, "test", "exec") for text in (setup, code)]
            for module in modules:
                # Some errors appear only here, such as a `return` outside a function.
                compile(module, "test", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return Asked(fault=f"it does not compile ({type(error).__name__}: {error})")
    symbols = list(_globals(*tables))
    used = {symbol.get_name() for symbol in symbols if symbol.is_referenced()}
    bound = {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()}
    own = own & used
    free = (used - bound - _BUILTINS) | own
    names = frozenset(free - (OFFERED.keys() - own))
    fault = next(_unsupported(modules[1]), "")
    if not fault and not names and _SOLUTION not in _imported(*modules):
        fault = "it does not use the program, so every program would pass"
    imports = "\n".join(OFFERED[name] for name in sorted(free - names))
    return Asked(
        names=names, own=own, imports=imports, fault=fault, needs_pytest=_needs_pytest(modules[1])
    )


def defined_names(code: str) -> set[str]:
    """The names that a program defines at its top level; none if it does not compile."""
    try:
        symbols = symtable.symtable(code, "program", "exec").get_symbols()
    except (SyntaxError, ValueError, RecursionError):
        return set()
    return {each.get_name() for each in symbols if each.is_assigned()}


def ambiguous(names: Iterable[str], setup: str) -> list[str]:
    """Those names of a program that Python, OFFERED or a setup may have too."""
    return sorted(name for name in names if setup or name in _BUILTINS or name in OFFERED)


def _asserts(problem: CodeProblem) -> Iterator[tuple[AssertTest, Asked]]:
    """Yield the assert tests of a problem, and what they ask."""
    for test in problem.tests:
        if isinstance(test, AssertTest):
            yield test, asked_by(problem.setup, test.code, test.own)


def names_asked(problem: CodeProblem) -> set[str]:
    """The names that a program must define for the calls and asserts of a problem."""
    names = {test.function for test in problem.tests if isinstance(test, CallTest)}
    for test, asked in _asserts(problem):
        names |= asked.names
        for node in ast.walk(ast.parse(test.code)):
            if isinstance(node, ast.ImportFrom) and node.module == _SOLUTION:
                names |= {alias.name for alias in node.names} - {"*"}
    return names


def require_usable(problem: CodeProblem) -> None:
    """Raise DataError if an assert test of a problem cannot judge any program."""
    for test, asked in _asserts(problem):
        if asked.fault:
            raise DataError(f"a test is broken: {asked.fault}; correct it: {test.code[:80]!r}")


def require_importable(problem: CodeProblem, packages: Sequence[str]) -> None:
    """Raise DataError if an assert test imports a module that a cell does not have."""
    known = {*sys.stdlib_module_names, _SOLUTION, *packages}
    for test, asked in _asserts(problem):
        needed = _imported(ast.parse(problem.setup), ast.parse(test.code))
        if asked.needs_pytest:
            needed.add("pytest")
        for name in needed - known:
            raise DataError(
                f"a test imports {name}, but only the standard library and"
                f" sandbox.packages={list(packages)} can be imported; add {name} there, or leave it"
                " out of the test"
            )


def _imported(*modules: ast.Module) -> set[str]:
    """Modules that are imported in any case: those in a function or a `try` may be optional."""
    names: set[str] = set()
    for node in (node for module in modules for node in module.body):
        match node:
            case ast.Import(names=aliases):
                names |= {alias.name.partition(".")[0] for alias in aliases}
            case ast.ImportFrom(module=str(name), level=0):
                names.add(name.partition(".")[0])
    return names


def _globals(*tables: symtable.SymbolTable) -> Iterator[symtable.Symbol]:
    """The global names of modules, in every scope that uses or binds them."""
    for table in tables:
        is_module = table.get_type() == "module"
        yield from (each for each in table.get_symbols() if is_module or each.is_global())
        yield from _globals(*table.get_children())


def _calls_of(module: ast.Module, own: Set[str]) -> tuple[Call, ...]:
    """The calls of a test that consists of `assert f(literals) == literal`; empty for another test.

    They are judged as call tests, by Python's own `==`: a batch of calls needs one child instead of
    two. This is the meaning that the judge gives to the same statement: there too the arguments are
    copied, the plain copy of the value is compared, and a value that is not plain equals nothing.
    """
    calls = []
    try:
        for statement in module.body:
            match statement:
                case ast.Assert(
                    test=ast.Compare(
                        left=ast.Call(func=ast.Name(id=name), args=args, keywords=[]),
                        ops=[ast.Eq()],
                        comparators=[expected],
                    )
                ) if name in own or (name not in _BUILTINS and name not in OFFERED):
                    literal = ast.literal_eval
                    calls.append(Call(name, [*map(literal, args)], literal(expected), "python"))
                case _:
                    return ()
    except (ValueError, TypeError, RecursionError):
        return ()
    return tuple(calls)


def _unsupported(module: ast.Module) -> Iterator[str]:
    """Reasons why the judge would leave out a test, or judge every program wrong."""
    for node in ast.walk(module):
        match node:
            case ast.Attribute(value=ast.Attribute(attr="mark"), attr=name) if name in _MARKS:
                yield f"a test with the mark {name} may not run"
            case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name) if (
                name in _ELSEWHERE.get(owner, ())
            ):
                yield f"{owner}.{name} is not supported, because the program is another process"
            case (
                ast.Attribute(value=ast.Attribute(attr="return_value"))
                | ast.Attribute(value=ast.Attribute(), attr="return_value")
                | ast.alias(name="mock_open" | "AsyncMock")
                | ast.Attribute(attr="mock_open" | "AsyncMock")
            ):
                yield "it gives the program an object of a mock, but the program is another process"
    for function in _cases(module):
        if isinstance(function, ast.AsyncFunctionDef):
            yield f"{function.name} is asynchronous and would not run; call asyncio.run in it"


def _needs_pytest(module: ast.Module) -> bool:
    """Return whether only pytest can run the tests."""
    for node in ast.walk(module):
        match node:
            case ast.Attribute(value=ast.Name(id="pytest"), attr="fixture" | "mark"):
                return True
            case ast.FunctionDef(name=name) if name in _PREPARATIONS:
                return True
    for function in _cases(module):
        given = [each.arg for each in function.args.args]
        if len(given) - len(function.args.defaults) > given.count("self"):
            return True
    return False


def _cases(module: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions and methods that are tests; not a function that the test calls itself."""
    used = {node.id for node in ast.walk(module) if isinstance(node, ast.Name)}
    for node in module.body:
        for function in node.body if isinstance(node, ast.ClassDef) else (node,):
            match function:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if (
                    name.startswith("test") and name not in used
                ):
                    yield function
