"""The messages between `async-rl replay` and its ranks; imports no heavy package."""

from __future__ import annotations

import msgspec

PLAN_FILE = "replay.json"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the ranks need. checkpoint: None to start with the start model.

    config: as in the replay's config.yaml; start: the version of the checkpoint; last: the step to
    end with.
    """

    directory: str
    run_dir: str
    model_path: str
    config: dict[str, object]
    checkpoint: str | None
    start: int
    last: int


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """One step. checksum: of the weights after it, as in `Published`; 0 on ranks above 0."""

    step: int
    checksum: int
    seconds: float
    metrics: dict[str, float]
