"""The directories of runs: which one a person means, and the name of a new one.

Invariants: a run is a directory with a config.yaml; its name is the name of the directory; the
newest run is the run that was launched last. The name of a new run is like `amber-otter-1120-1931`
(month and day, hour and minute).
"""

import random
import time
from pathlib import Path

from async_rl.composition.problems import hint
from async_rl.core.errors import ConfigError
from async_rl.runs.metrics import newest_row
from async_rl.runs.status import RunState, ending


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


def default_output_dir() -> Path:
    """Return the output_dir of conf/."""
    from async_rl.composition.compose import compose
    from async_rl.composition.files import QUICKSTART

    return Path(compose(QUICKSTART).output_dir)


def find_run(run: str | None, output_dir: Path | None) -> Path:
    """Return the directory of a run, given its name, its directory, or None for the newest. Raises
    ConfigError if there is none. output_dir: None for the directory in conf/.
    """
    output_dir = output_dir or default_output_dir()
    runs = all_runs(output_dir)
    if run is None:
        # A run that failed before its first step is found by its name; its logs have the reason.
        started = (
            path for path in runs if ending(path)[0] is not RunState.FAILED or newest_row(path)
        )
        if runs:
            return next(started, runs[0])
        raise ConfigError(
            f"no run exists in {output_dir}; give its directory, or start one with async-rl"
            " launch conf=ppo_code"
        )
    # A name first: a directory of the same name may be in the working directory by chance.
    for candidate in (output_dir / run, Path(run).expanduser()):
        if (candidate / "config.yaml").is_file():
            return candidate.absolute()
    remedy = hint(run, among=[path.name for path in runs])
    raise ConfigError(f"{run}: neither a run in {output_dir} nor the directory of one; {remedy}")


def all_runs(output_dir: Path) -> list[Path]:
    """Return the directories of all runs, newest first."""
    configs = sorted(
        # By the configuration, which is written at launch and at a resume.
        output_dir.glob("*/config.yaml"),
        key=lambda path: path.stat().st_mtime_ns,
        reverse=True,
    )
    return [path.parent.absolute() for path in configs]


def unique_name(output_dir: Path, *, rng: random.Random, now: time.struct_time) -> str:
    """Return a name that no run in `output_dir` has."""
    stamp = time.strftime("%m%d-%H%M", now)
    while True:
        # Runs that start in the same minute may draw the same words.
        name = f"{rng.choice(ADJECTIVES)}-{rng.choice(ANIMALS)}-{stamp}"
        if not (output_dir / name).exists():
            return name
