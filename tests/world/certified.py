"""Certificates of worlds: python tests/world/certified.py SEEDS [FIRST].

Prints each seed whose certificate has a broken statement, and the number of them. A seed without
faults that is reported is a false alarm.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import parts
from explore import problems_of
from scenarios import drawn
from world import World, clear

from async_rl.composition.compose import write_config
from async_rl.config.base import replace
from async_rl.core.types import Purpose
from async_rl.data.prompt_file import PROMPTS_FILE
from async_rl.data.prompts import write_prompts
from async_rl.runs.certificate.certify import certify
from async_rl.runs.certificate.statements import Certificate

PROBED = {"weights.probe_every_pushes": 10}
"""A certificate needs the probes, which the worlds of other tests leave out."""


def certified(world: World, *, order: int | None = None) -> Certificate:
    """Run the world, and certify it; its prompts and settings are where a run has them. order: the
    seed that they say; None: the seed of the world, which orders its prompts.
    """
    world.problems = problems_of(world)
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


def main() -> int:
    """Try the seeds; return 1 if a certificate has a broken statement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int, help="number of seeds")
    parser.add_argument("first", type=int, nargs="?", default=0, help="the first one")
    parser.add_argument("--calm", action="store_true", help="leave out all faults")
    arguments = parser.parse_args()
    shared = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="world_", dir=shared if shared.is_dir() else None)
    path = Path(folder) / "world"
    num_alarms = 0
    verdicts: Counter[str] = Counter()
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        clear(path)
        world = drawn(seed, path, PROBED)
        if arguments.calm:
            world.faults.clear()
        certificate = certified(world)
        verdicts.update(f"{each.verdict}: {each.promise}" for each in certificate.statements)
        found = broken(certificate)
        num_alarms += bool(found)
        for promise, why in found.items():
            print(f"seed {seed}: {promise}: {why}", world.faults, flush=True)
        for problem in world.problems:
            print(f"seed {seed}: world: {problem[:200]}")
    clear(Path(folder))
    for text, number in sorted(verdicts.items()):
        print(f"{number:6d} {text}")
    print(f"{arguments.seeds} seeds, {num_alarms} certificates have a broken statement")
    return int(num_alarms > 0)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": "0"})
    sys.exit(main())
