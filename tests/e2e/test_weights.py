"""Weights through files, as between machines, in a run that loses a generator in the middle of a
push.
"""

from collections.abc import Callable

import pytest
from e2e_support import LiveRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

QUICK = (
    "conf=grpo_code",
    "generation.engine=hf",
    "buffer.groups_per_step=4",
    "generation.group_size=4",
    "evaluation.every_steps=0",
)


def test_a_generator_that_dies_is_replaced_and_both_are_fed_from_files(
    launch: Callable[..., LiveRun],
) -> None:
    run = launch(
        *QUICK,
        "num_steps=40",
        "generators.count=2",
        "weights.transfer=filesystem",
        "weights.probe_every_pushes=2",
    )
    run.until(lambda: run.step >= 2, "step 2")
    assert {path.suffix for path in (run.run_dir / "weights").iterdir()} <= {".safetensors"}
    run.kill("generator-1")
    assert run.wait() == 0, run.terminal
    assert [row["step"] for row in run.rows] == list(range(1, 41))
    assert max(row["weights/probe_abs_max"] for row in run.rows) < 1e-3
    assert max(row["staleness/max_versions"] for row in run.rows) <= 2
    assert run.audit()["problems"] == []
    assert list((run.run_dir / "weights").iterdir()) == []
