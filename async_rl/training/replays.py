"""The message of `async-rl replay` to its ranks; imports no heavy package."""

from __future__ import annotations

import msgspec

PLAN_FILE = "replay.json"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the ranks need besides the directory `<run>/replays/<n>` that has the plan.

    config: as in the replay's config.yaml; start: the version of the checkpoint, 0 for the start
    model; last: the step to end with.
    """

    model_path: str
    config: dict[str, object]
    start: int
    last: int
