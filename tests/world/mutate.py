"""Plant the faults of mutants.yaml one at a time and try seeds until one breaks a promise.

python tests/world/mutate.py [--table FILE] [--first SEED] [--limit SEEDS] [--jobs N] [WORDS ...]:
all mutants, or those whose description has one of the words. Prints a row of MUTANTS_CORE.md for
each. The source on the disk stays as it is: a fork of this process changes functions in memory.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

from scenarios import drawn
from world import clear

from benchmarks.planting import PRODUCT, module_name, replace_functions

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

    def plant(self) -> None:
        """Change the functions of this process."""
        source = (PRODUCT / self.file).read_text()
        assert source.count(self.old) == 1, f"not once in {self.file}: {self.old}"
        module = importlib.import_module(module_name(self.file))
        changed = source.replace(self.old, self.new)
        assert replace_functions(module, changed), f"not in a function of {self.file}: {self.old}"


def mutants(table: str) -> list[Mutant]:
    """Return the faults of a table."""
    return msgspec.yaml.decode((HERE / table).read_bytes(), type=list[Mutant])


def hunt(mutant: Mutant, to_try: Iterable[int]) -> str:
    """Return `seed | number of schedules | problem` of the first seed that fails, or nothing."""
    mutant.plant()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "world"
        for number, seed in enumerate(to_try, 1):
            clear(path)
            problems = drawn(seed, path).play()
            if problems:
                line = problems[0].strip().splitlines()[-1]
                return f"{seed} | {number} | {line[:160]}"
    return ""


def in_fork(mutant: Mutant, to_try: Iterable[int]) -> tuple[str, float]:
    """Hunt in a fork; return what it found and its CPU seconds."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)

        def end(*_: object) -> None:
            os.write(writing, b"? | ? | a loop without an event, or too slow to tell")
            os._exit(1)

        signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST_S)
        signal.signal(signal.SIGVTALRM, end)
        try:
            found = hunt(mutant, to_try)
        except BaseException as error:  # noqa: BLE001 - also what the planting itself raises
            found = f"- | - | the hunt failed: {error!r}"
        os.write(writing, found.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        found = pipe.read().decode(errors="replace")
    _, _, usage = os.wait4(child, 0)
    return found, usage.ru_utime + usage.ru_stime


def main() -> int:
    """Hunt the mutants; return 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutants with one of these in `what`")
    parser.add_argument("--table", default="mutants.yaml")
    parser.add_argument("--first", type=int, default=100, help="seed")
    parser.add_argument("--limit", type=int, default=300, help="seeds per mutant")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    words = arguments.words or [""]
    chosen = [m for m in mutants(arguments.table) if any(word in m.what for word in words)]
    num_new = arguments.limit - len(FIRST_SEEDS)
    to_try = [*FIRST_SEEDS, *range(arguments.first, arguments.first + num_new)]
    print("| fault | file | seed | schedules | CPU s | first promise that breaks |")
    print("|---" * 6 + "|")
    num_found = 0
    with ThreadPoolExecutor(arguments.jobs) as threads:
        hunts = threads.map(lambda mutant: in_fork(mutant, to_try), chosen)
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
