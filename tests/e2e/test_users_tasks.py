"""What users bring, in whole runs: a reward function that fails, and rollouts of two turns."""

from collections.abc import Callable
from pathlib import Path

import pytest
from e2e_support import LiveRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Launch = Callable[..., LiveRun]
QUICK = (
    "generation.engine=hf",
    "buffer.groups_per_step=4",
    "generation.group_size=4",
    "evaluation.every_steps=0",
    "num_steps=3",
)
TASK = """
def fails(sample):
    raise ZeroDivisionError("my mistake")

def half(sample):
    return {"score": 0.5, "length": len(sample.response)}

async def rollout(talk):
    first = await talk.write(max_tokens=12)
    (result,) = await talk.test(first, talk.tests[1:2])
    talk.tell(f"# {result.verdict}\\n")
    await talk.write(max_tokens=12)
"""


def test_a_run_of_two_turns_trains_and_names_the_parts_of_its_reward(
    launch: Launch, tmp_path: Path
) -> None:
    (tmp_path / "task.py").write_text(TASK)
    functions = (
        "reward.terms.tests=tests",
        f"reward.terms.half={tmp_path}/task.py:half",
        "reward.terms.half.weight=2",
    )
    run = launch("conf=grpo_code", *QUICK, f"rollout.fn={tmp_path}/task.py:rollout", *functions)
    assert run.wait() == 0, run.terminal
    assert [row["step"] for row in run.rows] == [1, 2, 3]
    for row in run.rows:
        assert row["reward/mean"] == pytest.approx(row["reward/part/tests"] + 2 * 0.5)
        assert row["reward/part/half.length"] > 0
        assert (
            2 * 16 <= row["tokens/trained"] <= 24 * 16
        )  # of the policy's two turns, not of what it was told
        assert row["length/response_mean"] * 16 > row["tokens/trained"]


def test_a_run_stops_with_the_error_of_a_function_where_it_is_told_to(
    launch: Launch, tmp_path: Path
) -> None:
    (tmp_path / "task.py").write_text(TASK)
    run = launch(
        "conf=grpo_code",
        *QUICK,
        f"reward.terms.fails={tmp_path}/task.py:fails",
        "reward.stop_on=[function_failure]",
    )
    assert run.wait() == 1, run.terminal
    assert "RewardError" in run.terminal
    assert "fails raised ZeroDivisionError: my mistake" in run.terminal
