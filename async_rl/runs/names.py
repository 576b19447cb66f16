"""Names of runs, such as `amber-otter-1120-1931` (month and day, hour and minute)."""

from __future__ import annotations

import random
import time
from pathlib import Path


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words("""
    agile amber ample azure brave bright brisk calm clear clever coral crisp deft eager early
    fair fleet fond frank fresh gentle glad golden grand green happy hardy ivory jolly keen
    kind lively lucid lunar merry mild misty noble olive patient plain proud quick quiet rapid
    ready royal ruby sandy silver smart snowy solar solid steady sunny swift tidy vivid warm wise
""")
ANIMALS = _words("""
    badger bear beaver bison camel cat condor crane crow deer dolphin dove duck eagle egret
    falcon ferret finch fox gecko gibbon goose hare hawk heron horse ibex jackal jay koala
    lark lemur lion llama lynx marten mole moose newt otter owl panda parrot pony puffin
    rabbit raven robin salmon seal sparrow stork swan tapir tern tiger trout turtle whale wolf
    wren
""")


def unique_name(output_dir: Path, *, rng: random.Random, now: time.struct_time) -> str:
    """Return a name that no run in `output_dir` has."""
    stamp = time.strftime("%m%d-%H%M", now)
    while True:
        name = f"{rng.choice(ADJECTIVES)}-{rng.choice(ANIMALS)}-{stamp}"
        if not (output_dir / name).exists():
            return name
