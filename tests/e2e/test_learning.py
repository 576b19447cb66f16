"""The real loop with vLLM learns, and what it says about itself while it does is true."""

import statistics
from collections.abc import Iterator

import pytest
from e2e_support import LiveRun, shared_memory

from async_rl.observability.catalogue import describe
from benchmarks.learning.reference import band

NUM_STEPS = 30
MAX_STALENESS = 2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    before = shared_memory()
    run = LiveRun(
        tmp_path_factory.mktemp("learning"),
        "conf=grpo_code",
        f"num_steps={NUM_STEPS}",
        "weights.probe_every_pushes=5",
        # At the start, in the middle and at the end: 256 prompts take as long as two steps.
        "evaluation.every_steps=20",
    )
    try:
        assert run.wait(timeout_s=800) == 0, run.terminal
        assert run.processes() == []
        assert shared_memory() <= before
        yield run
    finally:
        run.end()


def test_held_out_pass_rate_rises_to_where_the_recorded_seeds_say(finished: LiveRun) -> None:
    """Those of `python -m benchmarks.learning.reference`; 1 run in 100 lies outside."""
    curve = {row["step"]: row["eval/pass_at_1"] for row in finished.rows if "eval/pass_at_1" in row}
    assert curve[0] <= 0.40
    # Single evaluations of 256 prompts have a standard error of 0.025: two are taken together.
    bands = [band("grpo_code")[step] for step in (20, NUM_STEPS)]
    least, most = (statistics.mean(limits) for limits in zip(*bands, strict=True))
    assert 0.45 < least <= (curve[20] + curve[NUM_STEPS]) / 2 <= most, curve


def test_staleness_never_exceeds_its_bound_and_generation_runs_ahead(finished: LiveRun) -> None:
    staleness = [row["staleness/max_versions"] for row in finished.rows[1:]]
    assert max(staleness) <= MAX_STALENESS
    assert max(staleness) >= 1


def test_learner_and_vllm_agree_on_tokens_of_the_learners_version(finished: LiveRun) -> None:
    fresh = [
        row["mismatch/engine_abs_max"] for row in finished.rows if "mismatch/engine_abs_max" in row
    ]
    assert fresh
    assert max(fresh) <= 1e-4
    assert max(row["weights/probe_abs_max"] for row in finished.rows[1:]) <= 1e-4


def test_the_last_step_is_saved_and_every_metric_is_declared(finished: LiveRun) -> None:
    names = {name for row in finished.rows for name in row} - {"step", "time_s"}
    assert [name for name in sorted(names) if describe(name) is None] == []
    assert (finished.run_dir / "checkpoints" / f"step_{NUM_STEPS:06d}").is_dir()
