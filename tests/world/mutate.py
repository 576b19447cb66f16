"""Plant the faults of mutants.yaml one at a time and try seeds until one breaks a promise.

python tests/world/mutate.py [--limit SEEDS] [--jobs N] [WORDS ...]: all mutants, or those whose
description has one of the words. Prints a row of MUTANTS_CORE.md for each. The source on the disk
stays as it is: a fork of this process imports the changed module.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import msgspec

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FIRST_SEEDS = (2064, 177, 94, 1079)
LONGEST_S = 200
"""A mutant that loops without an event counts as found."""


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault. unit: the test that finds it and why the world does not; empty if it does."""

    what: str
    file: str
    old: str
    new: str
    unit: str = ""

    @property
    def module(self) -> str:
        return "async_rl." + self.file.removesuffix(".py").replace("/", ".")


class _Planted(importlib.machinery.SourceFileLoader):
    mutant: Mutant

    def get_code(self, fullname: str) -> CodeType:
        source = Path(self.path).read_text()
        assert source.count(self.mutant.old) == 1, f"not once in {self.path}: {self.mutant.old}"
        return compile(source.replace(self.mutant.old, self.mutant.new), self.path, "exec")


class Planter(importlib.abc.MetaPathFinder):
    """Finds the module of one mutant with the fault in it."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> Any:
        if name != self._mutant.module:
            return None
        loader = _Planted(name, str(ROOT / "async_rl" / self._mutant.file))
        loader.mutant = self._mutant
        return importlib.util.spec_from_loader(name, loader)


def mutants() -> list[Mutant]:
    """Return the faults of mutants.yaml."""
    return msgspec.yaml.decode((HERE / "mutants.yaml").read_bytes(), type=list[Mutant])


def seeds(limit: int) -> Iterator[int]:
    """Yield the seeds to try, in order."""
    yield from FIRST_SEEDS
    yield from range(100, 100 + limit - len(FIRST_SEEDS))


def hunt(mutant: Mutant, limit: int) -> str:
    """Return `seed | number of schedules | problem` of the first seed that fails, or nothing."""
    sys.meta_path.insert(0, Planter(mutant))
    from explore import problems_of
    from scenarios import drawn
    from world import clear

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "world"
        for number, seed in enumerate(seeds(limit), 1):
            clear(path)
            problems = problems_of(drawn(seed, path))
            if problems:
                line = problems[0].strip().splitlines()[-1]
                return f"{seed} | {number} | {line[:160]}"
    return ""


def in_fork(mutant: Mutant, limit: int) -> tuple[str, float]:
    """Hunt in a fork; return what it found and its CPU seconds."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST_S)
        signal.signal(signal.SIGVTALRM, _looped(writing))
        try:
            found = hunt(mutant, limit)
        except BaseException as error:  # noqa: BLE001 - also what the planting itself raises
            found = f"- | - | the hunt failed: {error!r}"
        os.write(writing, found.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        found = pipe.read().decode(errors="replace")
    _, _, usage = os.wait4(child, 0)
    return found, usage.ru_utime + usage.ru_stime


def _looped(writing: int) -> Any:
    def end(*_: object) -> None:
        os.write(writing, b"? | ? | a loop without an event, or too slow to tell")
        os._exit(1)

    return end


def main() -> int:
    """Hunt the mutants; return 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutants with one of these in `what`")
    parser.add_argument("--limit", type=int, default=300, help="seeds per mutant")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    chosen = [
        m for m in mutants() if not arguments.words or any(w in m.what for w in arguments.words)
    ]
    # Heavy and without a fault: each fork has them already.
    import numpy  # noqa: F401
    import pydantic  # noqa: F401
    import torch  # noqa: F401

    sys.path[:0] = [str(HERE), str(HERE.parent)]
    print(
        "| fault | file | seed | schedules | CPU s | first promise that breaks |\n"
        + "|---" * 6
        + "|"
    )
    num_found = 0
    with ThreadPoolExecutor(arguments.jobs) as threads:
        hunts = threads.map(lambda mutant: in_fork(mutant, arguments.limit), chosen)
        for mutant, (found, cpu_s) in zip(chosen, hunts, strict=True):
            # A hunt that failed, or that took too long to tell, has found nothing.
            num_found += bool(found) and found[0] not in "-?"
            seed, number, problem = (
                found.split(" | ", 2) if found else ("-", "-", f"survives: {mutant.unit}")
            )
            print(
                f"| {mutant.what} | {mutant.file} | {seed} | {number} | {cpu_s:.0f} | {problem} |",
                flush=True,
            )
    print(f"\n{num_found} of {len(chosen)} found")
    return 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": "0"})
    sys.exit(main())
