"""The versions of a run on the disk: its checkpoint directories, and the checksum of each published
version.

A checkpoint of version v is `<run>/checkpoints/step_<v>`, complete as soon as it has that name.
learner/checkpoint.py writes its content; its checksums show whether the content is still the same.
`<run>/versions.jsonl` has a line for each published version. Two versions with equal checksums have
the same weights in the generators' dtype, except for a collision of 64 bits. A version that is
published again, after a return to an earlier checkpoint, has another line; the last line is valid.
`<run>/pushes.jsonl` has a line for each answer of a generator to a push.
"""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from async_rl.core import records
from async_rl.core.checksums import damage
from async_rl.core.errors import DataError

VERSIONS_FILE = "versions.jsonl"
PUSHES_FILE = "pushes.jsonl"


def directory_of(run_dir: Path, version: int) -> Path:
    """Return the directory of the checkpoint of this version."""
    return run_dir / "checkpoints" / f"step_{version:06d}"


def versions(run_dir: Path) -> list[int]:
    """Return the versions of the complete checkpoints, oldest first."""
    names = (
        path.name.removeprefix("step_")
        for path in (run_dir / "checkpoints").glob("step_*")
        if path.is_dir()
    )
    return sorted(int(name) for name in names if name.isdecimal())


def choose(run_dir: Path, *, first: int, last: int) -> tuple[Path | None, Mapping[Path, str]]:
    """Return the newest checkpoint that is undamaged and that the store covers, None before the
    first, and the newer ones with the reasons against them as half sentences.

    first, last: the versions that the store covers. Raises DataError if there are checkpoints but
    none can be used: a start from version 0 would discard the run.
    """
    # Newest first, because each older checkpoint means more steps to train again.
    refused: dict[Path, str] = {}
    for version in reversed(versions(run_dir)):
        directory = directory_of(run_dir, version)
        if version > last:
            reason = f"the store has the batches of the steps up to {last} only"
        elif version < first:
            reason = f"the store no longer has the trajectories of the steps up to {first}"
        else:
            reason = damage(directory)
        if not reason:
            return directory, refused
        refused[directory] = reason
    if refused:
        reasons = "; ".join(f"{path.name}: {reason}" for path, reason in refused.items())
        raise DataError(
            f"no checkpoint in {run_dir / 'checkpoints'} can be used: {reasons}; restore the"
            " checkpoint or the store from a copy (checkpoint.mirror), or start a new run"
        )
    return None, refused


def verified(run_dir: Path, version: int) -> Path:
    """Return the checkpoint of this version. Raises DataError if it is damaged."""
    directory = directory_of(run_dir, version)
    reason = damage(directory)
    if reason:
        raise DataError(
            f"{directory} is damaged: {reason}; use another checkpoint of {versions(run_dir)}"
        )
    return directory


def damaged(run_dir: Path) -> Iterator[str]:
    """Yield a sentence for each damaged checkpoint, also while the run writes and deletes some."""
    for version in versions(run_dir):
        directory = directory_of(run_dir, version)
        # A checkpoint that is being deleted looks damaged at first, and is missing at the second
        # reading.
        if damage(directory):
            reason = damage(directory)
            if reason and directory.is_dir():
                yield f"checkpoint {directory.name} is damaged: {reason}"


def set_aside(directory: Path) -> Path:
    """Rename a checkpoint so that no resume considers it, and return its new name."""
    aside = directory.with_name(directory.name + ".set_aside")
    shutil.rmtree(aside, ignore_errors=True)
    return directory.rename(aside)


def prune(run_dir: Path, *, keep: int, keep_best: int, scores: Mapping[int, float]) -> int:
    """Delete all but the newest `keep` and, among the older, the `keep_best` of the highest score.

    Returns the oldest of the newest `keep`, the oldest version that the learner may resume from.
    """
    saved = versions(run_dir)
    recent = saved[-keep:]
    older = saved[:-keep]
    # A version without an evaluation cannot be one of the best.
    scored = [version for version in older if version in scores]
    # Among equal scores the later version.
    best = sorted(scored, key=lambda version: (scores[version], version), reverse=True)[:keep_best]
    for version in set(older) - set(best):
        shutil.rmtree(directory_of(run_dir, version))
    return recent[0]


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """One line of versions.jsonl. checksum: as in the manifest of the push; life: the learner's, as
    in protocol/buffer.py `Synced`.
    """

    version: int
    checksum: int
    life: int = 0


class Probed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of a probe. worst, mean: |generator - learner| over the tokens, in nats. followed,
    error: as training/mismatch.py `followed_share`, since the previous probe of this life. problem:
    of a difference beyond the tolerance.
    """

    version: int
    # JSON has no NaN; a line that is read back has None for it.
    worst: float | None
    mean: float | None
    followed: float | None = None
    error: float | None = None
    problem: str = ""


class Pushed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of pushes.jsonl: the answer of a generator to a push.

    life: the learner's; generator, pid: the generator's. at_s: Unix time of the answer; push_s:
    seconds from the request to the report. loaded: the version that the generator reports; None
    if it failed, for the reason. probed: after the load, if a probe was due.
    """

    version: int
    life: int
    generator: str
    pid: int
    at_s: float
    push_s: float = 0.0
    loaded: int | None = None
    reason: str = ""
    probed: Probed | None = None


def published_checksums(run_dir: Path) -> dict[int, int]:
    """Return the checksums by version; empty if the run did not record them."""
    lines = records.read(run_dir / VERSIONS_FILE, Published)
    return {published.version: published.checksum for published in lines}
