"""From a seed to a world: its sizes and its faults."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from world import Fault, World

NAMES = ("buffer", "learner-0", "generator-0", "generator-1", "supervisor")
CHILDREN = NAMES[:-1]
LONGEST_S = 40.0
"""Faults begin before this time of the run."""


def drawn(seed: int, path: Path) -> World:
    """The world of a seed."""
    rng = random.Random(f"scenario {seed}")
    max_staleness = rng.choice((0, 1, 1, 2, 4))
    settings = {
        "buffer.max_staleness_versions": max_staleness,
        "buffer.groups_per_step": rng.choice((1, 2, 2, 4)),
        "generators.count": rng.choice((1, 2, 2, 3)),
        "generation.max_concurrent_groups": rng.choice((1, 3, 8)),
        "checkpoint.every_steps": rng.choice((1, 2, 3, 5)),
        "checkpoint.keep": rng.choice((1, 2)),
        "evaluation.every_steps": rng.choice((0, 1, 3)),
        # Less often, nothing could be generated within the bound.
        "weights.push_every_steps": rng.choice((1, 1, min(2, max_staleness + 1))),
        "buffer.age_rule": rng.choice(("drop", "drop", "mask")),
        "recording": rng.choice(("off", "full")),
    }
    faults = sorted(
        (_fault(rng) for _ in range(rng.choice((0, 1, 2, 4, 8)))), key=lambda fault: fault.at_s
    )
    sizes: dict[str, float] = {
        "token_s": rng.choice((0.02, 0.2, 0.5)),
        "verdict_s": rng.choice((0.05, 0.3, 3.0)),
        "step_s": rng.choice((0.1, 0.5, 2.0)),
        "load_s": rng.choice((0.02, 0.1, 1.0)),
        "save_s": rng.choice((0.1, 0.5, 5.0)),
        "commit_s": rng.choice((0.001, 0.02, 0.2)),
        "bad_batches": rng.choice((0.0, 0.0, 0.1, 0.25)),
        "failed_verdicts": rng.choice((0.0, 0.0, 0.1)),
        "broken_loads": rng.choice((0.0, 0.0, 0.05)),
        "repeat": rng.choice((0.0, 0.0, 0.1)),
    }
    if rng.random() < 0.3:
        faults = sorted([*faults, *_scaling(rng)], key=lambda fault: fault.at_s)
    # From a generator of its own, so that the worlds of known seeds stay the same.
    clocks = random.Random(f"clocks {seed}")
    if clocks.random() < 0.2:
        jump = (clocks.choice(NAMES), clocks.choice((-7200.0, -5.0, 5.0, 7200.0)))
        faults = [*faults, Fault(clocks.uniform(0.0, LONGEST_S), "jump", jump)]
        faults.sort(key=lambda fault: fault.at_s)
    return World(seed=seed, path=path, settings=settings, faults=faults, **sizes)


def _fault(rng: random.Random) -> Fault:
    at_s = rng.uniform(0.0, LONGEST_S)
    kind = rng.choice(
        ("kill", "kill", "kill", "stop", "stop", "cut", "slow", "slow_disk", "lose_all")
    )
    arguments: tuple[Any, ...] = ()
    match kind:
        case "kill":
            arguments = (rng.choice(CHILDREN),)
        case "stop":
            arguments = (rng.choice(CHILDREN), rng.choice((0.5, 5.0, 20.0, 60.0)))
        case "cut":
            one, other = rng.sample(NAMES, 2)
            arguments = (one, other, rng.choice((0.5, 5.0, 25.0, 60.0)))
        case "slow":
            arguments = (rng.choice(NAMES), rng.choice((0.05, 1.0)), rng.choice((5.0, 30.0)))
        case "slow_disk":
            arguments = (rng.choice((0.5, 5.0)), rng.choice((5.0, 30.0)))
    return Fault(at_s, kind, arguments)


def _scaling(rng: random.Random) -> list[Fault]:
    """A person who scales the run now and then, at last to what it needs."""
    times_s = sorted(rng.uniform(0.0, LONGEST_S) for _ in range(rng.choice((1, 2, 4))))
    counts = [rng.choice((0, 1, 2, 4)) for _ in times_s]
    last = {"generators": 1, "verifiers": 1}
    wanted = [{"generators": count, "verifiers": rng.choice((1, 2))} for count in counts]
    scaled = zip([*times_s, LONGEST_S + 1], [*wanted, last], strict=True)
    return [Fault(at_s, "scale", kinds=kinds) for at_s, kinds in scaled]
