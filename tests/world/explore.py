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

import parts
from scenarios import drawn
from world import Fault, World, clear

from async_rl.composition.compose import write_config
from async_rl.config.base import replace
from async_rl.core.types import Purpose
from async_rl.data.prompt_file import PROMPTS_FILE
from async_rl.data.prompts import write_prompts
from async_rl.runs.certificate.certify import certify
from async_rl.runs.certificate.statements import Certificate

_perf_s = time.perf_counter
PROBED = {"weights.probe_every_pushes": 10}
"""A certificate needs the probes, which the worlds of other tests leave out."""


def certified(world: World, *, order: int | None = None) -> Certificate:
    """Certify a world that was played; its prompts and settings are where a run has them. order:
    the seed that they say; None: the seed of the world, which orders its prompts.
    """
    settings = world.run_dir / "config.yaml"
    settings.unlink(missing_ok=True)
    seed = world.seed if order is None else order
    write_config(replace(world.config, seed=seed), settings)
    prompts = parts.Prompts(seed)
    rows = {Purpose.TRAIN: prompts.rows, Purpose.EVAL: prompts.held_out}
    write_prompts(world.run_dir / PROMPTS_FILE, "", rows)
    return certify(world.run_dir)


def broken(certificate: Certificate) -> dict[str, str]:
    """The promises that do not hold, each with the sentences that say why."""
    return {each.promise: "\n".join(each.evidence) for each in certificate.broken}


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
