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
_ELSEWHERE = frozenset({"patch", "redirect_stdout", "stdout", "skip", "skipif", "xfail"})


@frozen
class Asked:
    """What a test asks of the program.

    names: global names that setup and test use but do not bind, builtins and OFFERED excepted, and
    those that the row says the program defines (`own`); imports: the statements of OFFERED that the
    test needs; fault: the reason why it cannot judge any program.
    """

    names: frozenset[str] = frozenset()
    own: frozenset[str] = frozenset()
    imports: str = ""
    fault: str = ""


# A data set repeats its setup, and a request its test: each is read once.
@functools.lru_cache(maxsize=4096)
def asked_by(setup: str, code: str, own: frozenset[str] = frozenset()) -> Asked:
    """Read a test with its setup. own: names that the row says the program defines."""
    try:
        with warnings.catch_warnings():
            # A test of a data set may have an invalid escape, which the verifier need not report.
            warnings.simplefilter("ignore")
            tables = [symtable.symtable(text, "test", "exec") for text in (setup, code)]
            modules = [ast.parse(text) for text in (setup, code)]
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
    return Asked(names=names, own=own, imports=imports, fault=fault)


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


def names_asked(problem: CodeProblem) -> set[str]:
    """The names that a program must define for the calls and asserts of a problem."""
    names: set[str] = set()
    for test in problem.tests:
        if isinstance(test, CallTest):
            names.add(test.function)
        elif isinstance(test, AssertTest):
            names |= asked_by(problem.setup, test.code, test.own).names
            for node in ast.walk(ast.parse(test.code)):
                if isinstance(node, ast.ImportFrom) and node.module == _SOLUTION:
                    names |= {alias.name for alias in node.names} - {"*"}
    return names


def require_usable(problem: CodeProblem) -> None:
    """Raise DataError if an assert test of a problem cannot judge any program."""
    for test in problem.tests:
        if isinstance(test, AssertTest):
            fault = asked_by(problem.setup, test.code, test.own).fault
            if fault:
                raise DataError(f"a test is broken: {fault}; correct it: {test.code[:80]!r}")


def require_importable(problem: CodeProblem, packages: Sequence[str]) -> None:
    """Raise DataError if an assert test imports a module that a cell does not have."""
    known = {*sys.stdlib_module_names, _SOLUTION, *packages}
    codes = [test.code for test in problem.tests if isinstance(test, AssertTest)]
    for code in (problem.setup, *codes) if codes else ():
        for name in _imported(ast.parse(code)) - known:
            raise DataError(
                f"a test imports {name}, but only the standard library and"
                f" sandbox.packages={list(packages)} can be imported; add {name} there, or leave it"
                " out of the test"
            )


def _imported(*modules: ast.Module) -> Set[str]:
    """Modules that are imported in any case: those in a function or a `try` may be optional."""
    names = set()
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


def _unsupported(module: ast.Module) -> Iterator[str]:
    """Reasons why the judge would leave out a test in the form of pytest or unittest."""
    for node in ast.walk(module):
        match node:
            case (
                ast.alias(name="patch" | "redirect_stdout" as name)
                | ast.Attribute(value=ast.Name(id="mock" | "contextlib"), attr=name)
                | ast.Attribute(value=ast.Attribute(attr="mock" | "mark"), attr=name)
                | ast.Attribute(value=ast.Name(id="sys"), attr="stdout" as name, ctx=ast.Store())
            ) if name in _ELSEWHERE:
                yield f"{name} is not supported, because the program is another process"
    # A function that the test calls itself runs in any case.
    used = {node.id for node in ast.walk(module) if isinstance(node, ast.Name)}
    for node in module.body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() if node.name not in used:
                yield from _not_run(node, num_given=0)
            case ast.ClassDef(name=name, bases=[]) if name.startswith("Test"):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                        yield from _not_run(method, num_given=1)
                        if method.name.startswith(("setup", "teardown")):
                            yield f"{name}.{method.name} would not run; use unittest.TestCase"


def _not_run(function: ast.FunctionDef | ast.AsyncFunctionDef, num_given: int) -> Iterator[str]:
    if not function.name.startswith("test"):
        return
    if isinstance(function, ast.AsyncFunctionDef):
        yield f"{function.name} is asynchronous and would not run; call asyncio.run in it"
    elif len(function.args.args) - len(function.args.defaults) > num_given:
        yield f"{function.name} takes arguments, and fixtures and parameters are not supported"
