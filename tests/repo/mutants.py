"""Show that the tests marked with `proves` fail when the product ignores their setting.

usage: mutants.py [--slow] [PATH_PREFIX ...]   (make mutants SETTINGS="algorithm. learner.")

For each setting, a copy of the tree gets a schema in which product code reads the value of conf/
whatever the configuration says; then only the marked tests run. A mutant whose tests all pass
survives: the tests would not notice a product that ignores the setting. Tests, the checks of
`config/checks/` and composition read the real value, so a test that only sees a refusal proves
nothing here.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
from proofs import proofs_of
from repository import files, name
from rich.console import Console
from rich.table import Table

from async_rl.config.base import Section
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.launchers.configuration.compose import compose
from async_rl.launchers.configuration.schema import settings

TIMEOUT_S = 900
TIMED_OUT = -1
INSTALLED_INSIDE = ("launchers", "sandbox", "conf")
"""Folders that setup maps into the package `async_rl`."""

MUTATION = """

def _ignore_setting() -> None:
    import sys

    import msgspec

    section = {section}
    real = section.__dict__[{leaf!r}]
    kind = next(f.type for f in msgspec.structs.fields(section) if f.name == {leaf!r})

    def read(self):
        reader = sys._getframe(1).f_code.co_filename
        if any(part in reader for part in ("/tests/", "/config/checks/", "/configuration/")):
            return real.__get__(self)
        return msgspec.json.decode({value!r}, type=kind)

    setattr(section, {leaf!r}, property(read))


_ignore_setting()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The tests of one mutant.

    outcome: `caught`, `SURVIVED`, `not run` (all its tests are slow and `--slow` is not given),
    `timed out`, or `broken` if pytest could not run them.
    """

    setting: str
    outcome: str
    num_tests: int
    seconds: float
    output: str = ""


def sections_of(kind: Any) -> Iterator[type[Section]]:
    """The sections that a field of this type may hold: itself, or the members of a union."""
    if get_origin(kind) is Annotated:
        yield from sections_of(get_args(kind)[0])
    elif get_origin(kind) in (Union, types.UnionType):
        for member in get_args(kind):
            yield from sections_of(member)
    elif isinstance(kind, type) and issubclass(kind, Section):
        yield kind


def owners(setting: str) -> list[tuple[type[Section], str]]:
    """The classes with the last part of the path as a field, and the field's name in Python."""
    *parents, leaf = setting.split(".")
    level: list[type[Section]] = [RunConfig]
    for parent in parents:
        level = [
            section
            for kind in level
            for field in msgspec.structs.fields(kind)
            if field.encode_name == parent
            for section in sections_of(field.type)
        ]
    return [
        (kind, field.name)
        for kind in level
        for field in msgspec.structs.fields(kind)
        if field.encode_name == leaf
    ]


def default_of(setting: str) -> Any:
    """The value of the first of conf/'s configurations that has the setting."""
    for conf in ("grpo_code", "ppo_code"):
        value: Any = compose(conf)
        try:
            for part in setting.split("."):
                value = getattr(value, part)
        except AttributeError:
            continue
        return value
    raise ConfigError(f"{setting}: no value in conf/ to replace it with")


def copy_tree(target: Path) -> None:
    """Copy the files of the repository, with the package laid out as it is installed."""
    for path in files():
        copy = target / name(path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    for folder in INSTALLED_INSIDE:
        (target / "async_rl" / folder).symlink_to(target / folder)


def run_tests(tree: Path, tests: Sequence[str], selection: Sequence[str]) -> tuple[int, str]:
    """Run the tests against the package in the tree; return pytest's status and output."""
    command = [sys.executable, "-m", "pytest", "-x", "-rf", "-p", "no:cacheprovider", "--timeout=0"]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *selection, *tests],
            cwd=tree,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return TIMED_OUT, ""
    return done.returncode, done.stdout


def try_mutant(setting: str, tree: Path, selection: Sequence[str]) -> Result:
    """Run the tests of a setting while the tree ignores it, and restore the tree afterwards."""
    started_s = time.monotonic()
    tests = proofs_of(setting)
    value = msgspec.json.encode(default_of(setting))
    changed: dict[Path, str] = {}
    for section, leaf in owners(setting):
        path = tree / (section.__module__.replace(".", "/") + ".py")
        changed.setdefault(path, path.read_text())
        mutation = MUTATION.format(section=section.__name__, leaf=leaf, value=value)
        path.write_text(path.read_text() + mutation)
    try:
        status, output = run_tests(tree, tests, selection)
    finally:
        for path, text in changed.items():
            path.write_text(text)
    outcome = {0: "SURVIVED", 1: "caught", 5: "not run", TIMED_OUT: "timed out"}.get(
        status, "broken"
    )
    seconds = time.monotonic() - started_s
    return Result(
        setting=setting, outcome=outcome, num_tests=len(tests), seconds=seconds, output=output
    )


def main() -> int:
    """Print one row per mutant; the exit status is 1 if any survives."""
    parser = argparse.ArgumentParser()
    parser.add_argument("prefixes", nargs="*", default=[""])
    parser.add_argument("--slow", action="store_true", help="run tests marked slow too")
    arguments = parser.parse_args()
    prefixes = tuple(arguments.prefixes)
    chosen = [path for path in settings() if proofs_of(path) and path.startswith(prefixes)]
    selection = [] if arguments.slow else ["-m", "not slow"]
    table = Table("setting", "outcome", "tests", "seconds", "first failure")
    console = Console(width=160)
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        tests = sorted({test for path in chosen for test in proofs_of(path)})
        status, output = run_tests(tree, tests, selection)
        if status not in (0, 5):
            console.print(output, markup=False)
            console.print("the marked tests fail without any mutation; repair them first")
            return 2
        for setting in chosen:
            result = try_mutant(setting, tree, selection)
            survivors += result.outcome != "caught"
            failed = [line for line in result.output.splitlines() if line.startswith("E  ")]
            reason = failed[0][1:].strip()[:60] if failed else ""
            row = (setting, result.outcome, str(result.num_tests), f"{result.seconds:.0f}", reason)
            table.add_row(*row)
            console.print(*row, markup=False)
            if result.outcome == "broken":
                console.print(result.output[-2000:], markup=False)
    console.print(table)
    console.print(f"{len(chosen) - survivors} of {len(chosen)} mutants caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
