"""The run of this folder: its learner was killed, then the whole machine, its newest checkpoint was
damaged, and it was resumed.
"""

import collections
import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from e2e_support import LiveRun

SETTINGS = (
    "conf=ppo_code",
    "generation.engine=hf",
    "buffer.groups_per_step=4",
    "buffer.max_staleness_versions=0",
    "generation.group_size=4",
    # One group after the other: what is sampled does not depend on what finishes first.
    "generation.max_concurrent_groups=1",
    "learner.ranks=2",
    "evaluation.every_steps=0",
    "reward.mode=fraction",
    "reward.fail_reward=-1",
    "reward.placement=step_deltas",
    "recording=full",
    "checkpoint.every_steps=3",
    "checkpoint.keep=10",
    "timeouts.call_s=10",
    "num_steps=400",
)
LAST = 11
"""More than the eight steps that `explain` and `plan` need; how far the first life comes is up to
the machine, but it is killed at step 7 or soon after.
"""


@dataclass(frozen=True)
class Resumed:
    """The run after its end. calls: of each file of the product in four of its steps. damaged: the
    checkpoint that was the newest one.
    """

    run: LiveRun
    copies: Path
    calls: dict[str, int]
    damaged: Path

    @property
    def directory(self) -> Path:
        return self.run.run_dir


@contextlib.contextmanager
def resumed_run(directory: Path) -> Iterator[Resumed]:
    """Start it, do to it what the docstring of this module says, and give it out at its end."""
    copies, walk = directory / "copies", directory / "walk"
    walk.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WALK", str(walk))
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "walk"))
        run = LiveRun(directory / "runs", *SETTINGS, f"checkpoint.mirror={copies}")
    try:
        run.until(lambda: run.step >= 1, "step 1")
        (walk / "on").touch()
        run.until(lambda: run.step >= 5, "step 5")
        # Before the kill: what the learner's next life does at its start belongs to no step.
        calls = _calls(walk)
        (walk / "on").unlink()
        run.kill("learner-0")
        run.until(lambda: run.step >= 7, "step 7")
        run.kill_all()
        assert run.step < LAST, "the run is faster than this test expects"
        *_, damaged = sorted((run.run_dir / "checkpoints").iterdir())
        for path in damaged.glob("*.safetensors"):
            path.write_bytes(path.read_bytes()[:100])
        run = LiveRun(directory / "runs", f"num_steps={LAST}", resumes=True)
        assert run.wait() == 0, run.terminal
        yield Resumed(run, copies, calls, damaged)
    finally:
        run.end()


def _calls(walk: Path) -> dict[str, int]:
    calls: collections.Counter[str] = collections.Counter()
    for report in walk.glob("*.json"):
        calls.update(json.loads(report.read_text()))
    return dict(calls)
