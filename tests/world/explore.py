"""Try seeds of the world: python tests/world/explore.py SEEDS [FIRST], or one seed with --show.

Prints each seed whose promises break, with the fewest of its faults that still break them, and the
rate. --certify: prints the seeds whose certificate has a broken statement instead, and how often
each statement had each verdict; with --calm, without faults, such a seed is a false alarm. The
order of sets depends on Python's hash seed, which is fixed here, so a seed repeats.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from certified import PROBED, broken, certified
from scenarios import drawn
from world import Fault, clear

_perf_s = time.perf_counter


def fewest(seed: int, faults: list[Fault], path: Path) -> list[Fault]:
    """Leave out faults, one at a time, without which the promises still break."""
    left = list(faults)
    for fault in faults:
        fewer = [other for other in left if other is not fault]
        clear(path)
        if dataclasses.replace(drawn(seed, path), faults=fewer).play():
            left = fewer
    return left


def main() -> int:
    """Try the seeds; return 1 if one breaks a promise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int, help="number of seeds")
    parser.add_argument("first", type=int, nargs="?", default=0, help="the first one")
    parser.add_argument("--show", action="store_true", help="print the log of each world")
    parser.add_argument("--certify", action="store_true", help="print broken certificates instead")
    parser.add_argument("--calm", action="store_true", help="leave out all faults")
    arguments = parser.parse_args()
    # Memory: the store is a file, and the disk would be most of the time.
    shared = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="world_", dir=shared if shared.is_dir() else None)
    path = Path(folder) / "world"
    started_s = _perf_s()
    num_bad = num_callbacks = 0
    verdicts: Counter[str] = Counter()
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        clear(path)
        world = drawn(seed, path, PROBED if arguments.certify else {})
        if arguments.calm:
            world.faults.clear()
        problems = world.play()
        if arguments.certify:
            certificate = certified(world)
            verdicts.update(f"{each.verdict}: {each.promise}" for each in certificate.statements)
            problems = [f"{promise}: {why}" for promise, why in broken(certificate).items()]
        num_callbacks += world.loop.num_callbacks
        if arguments.show:
            print("\n".join(world.log))
        if problems:
            num_bad += 1
            faults = world.faults if arguments.certify else fewest(seed, world.faults, path)
            print(f"seed {seed}: {problems[0]}", *faults, sep="\n  ", flush=True)
    clear(Path(folder))
    took_s = _perf_s() - started_s
    for text, number in sorted(verdicts.items()):
        print(f"{number:6d} {text}")
    print(
        f"{arguments.seeds} seeds, {num_bad} break a promise; {num_callbacks} events in"
        f" {took_s:.0f} s ({num_callbacks / took_s:.0f} per second)"
    )
    return int(num_bad > 0)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": "0"})
    sys.exit(main())
