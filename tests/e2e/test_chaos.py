"""Processes of one run are stopped and killed, its pools are scaled. Each loss shows with its
cause, is repaired, and costs nothing else.

Order and moments of faults are tested in tests/world; here real processes die, and weights travel
through files, as between machines.
"""

import contextlib
import json
import re
import signal
import sqlite3
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from e2e_support import SMALL, LiveRun, async_rl, open_to_others, shared_memory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SETTINGS = (
    *SMALL,
    "generators.count=0",
    "generators.pools.big={count:1,work:train,max_concurrent_groups:2}",
    "generators.pools.small={count:1,work:train,max_concurrent_groups:1}",
    "generators.pools.judge={count:0,work:evaluation,max_concurrent_groups:8}",
    "evaluation.every_steps=8",
    "evaluation.num_prompts=4",
    "generation.max_attempts=20",
    "checkpoint.every_steps=3",
    "weights.transfer=filesystem",
    "weights.probe_every_pushes=1",
    "monitoring.tensorboard_port=0",
    "supervisor.max_restarts=20",
    # Silence ends a process after 30 s (1.5 call_s), later than anything here waits.
    "timeouts.call_s=20",
    "num_steps=100000",
)
GENERATING = "transitions.state='generating'"
BIG, SMALL_ONE, JUDGE = "generator-big-0", "generator-small-0", "generator-judge-0"
LOST = (BIG, "verifier-0", "buffer")
"""Stopped together, and killed together later: each start of a generator takes five seconds of a
processor, and the run waits meanwhile.
"""
VISIBLE_S = 5.0
LATEST_S = 20.0
"""A machine that is shared may be late now and then, not as a rule."""


@dataclass
class Story:
    """The run after its end, and what was seen while it lived."""

    run: LiveRun
    leaked: set[str] = field(default_factory=set)
    seen_after_s: dict[str, float] = field(default_factory=dict)
    told: dict[str, dict[str, Any]] = field(default_factory=dict)
    weight_files: set[str] = field(default_factory=set)
    learner_pids: list[int] = field(default_factory=list)
    scaled: str = ""
    without_judge: int = 0

    def step(self) -> int:
        """As the run tells it; the rows of metrics.jsonl wait for evaluations."""
        return int(self.run.now().get("step", -1))

    def steps_on(self, number: int, what: str) -> None:
        at = self.step()
        self.run.until(lambda: self.step() >= at + number, what)

    def see(self, condition: Callable[[], bool], what: str) -> None:
        started_s = time.monotonic()
        self.run.until(condition, what, timeout_s=LATEST_S)
        self.seen_after_s[what] = time.monotonic() - started_s


@pytest.fixture(scope="session")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    before = shared_memory()
    story = Story(LiveRun(tmp_path_factory.mktemp("chaos"), *SETTINGS))
    run = story.run
    try:
        run.until(lambda: story.step() >= 2, "two steps")
        run.until(lambda: ask(run, "plugin/custom_scalars/layout") != "", "TensorBoard answers")
        stop_and_continue(story)
        kill_in_a_push(story)
        scale(story)
        assert async_rl("stop", str(run.run_dir)).returncode == 0
        assert run.wait() == 0, run.terminal
        story.leaked = shared_memory() - before
        yield story
    finally:
        run.end()


def stop_and_continue(story: Story) -> None:
    run = story.run
    # A late heartbeat may have been announced before.
    announced = texts(run, "run/silent")
    for process in LOST:
        run.kill(process, signal.SIGSTOP)
    for process in LOST:
        said = f"{process} is silent"
        story.see(
            lambda text=said: texts(run, "run/silent").count(text) > announced.count(text),
            f"{said} in TensorBoard",
        )
        story.told[process] = run.member(process)
    for process in LOST:
        run.kill(process, signal.SIGCONT)
    for process in LOST:
        sentence = f"{process} sends heartbeats again"
        run.until(lambda text=sentence: text in texts(run, "run/silent"), sentence)
    story.steps_on(1, "a step after all of them continued")


def kill_in_a_push(story: Story) -> None:
    """At the moment at which a step's file of weights appears, then the learner, while one of two
    generators starts.
    """
    run = story.run
    killed = {process: run.pid_of(process) for process in (*LOST, "learner-0")}

    def is_written() -> bool:
        # Between two versions the folder is empty: the old file is deleted before the new one.
        new = {path.name for path in (run.run_dir / "weights").glob("life_*/*")}
        is_new = bool(new - story.weight_files) and bool(story.weight_files)
        if is_new:
            assert open_to_others(run.run_dir, *run.blocks()) == []
        story.weight_files |= new
        return is_new

    run.until(is_written, "a new file of weights", look_s=0.005)
    for process in LOST:
        run.kill(process)
    for process in LOST:
        story.see(
            lambda name=process: "SIGKILL" in run.now()["restarted_because"].get(name, ""),
            f"{process} killed in status",
        )
        restarted = f"{process} is restarted: {process} was ended by SIGKILL"
        story.see(
            lambda text=restarted: text in texts(run, "run/restarts"),
            f"{process} killed in TensorBoard",
        )
    story.steps_on(2, "steps with the generator that is left")
    run.kill("learner-0")
    for process, pid in killed.items():
        run.serves_again(process, pid)
    story.steps_on(2, "steps with all of them")


def scale(story: Story) -> None:
    run = story.run
    story.learner_pids.append(run.pid_of("learner-0"))
    rest = {"generators": (0, 0), "verifiers": (1, 1)}
    names = [f"generators.{name}" for name in ("big", "small", "judge")]
    there = dict(zip(names, [(1, 1), (1, 1), (0, 0)], strict=True)) | rest
    run.until(lambda: counts(run) == there, "the pools as they started")
    run.until(lambda: SMALL_ONE in generators(run.run_dir, GENERATING), "a group of the small one")
    run.until(lambda: story.step() >= 8, "a second evaluation that waits")
    story.without_judge = story.step()
    sizes = ("generators.big=2", "generators.small=0", "generators.judge=1")
    done = async_rl("scale", str(run.run_dir), *sizes)
    assert done.returncode == 0, done.stderr
    story.scaled = done.stdout
    there |= dict(zip(names, [(2, 2), (0, 0), (1, 1)], strict=True))
    run.until(lambda: counts(run) == there, "two big ones and the evaluator")
    story.steps_on(1, "a step of the big ones")
    run.until(lambda: run.step >= story.without_judge, "the evaluations that had to wait")
    story.learner_pids.append(run.pid_of("learner-0"))


def texts(run: LiveRun, tag: str) -> str:
    """All that TensorBoard serves under a text tag."""
    return ask(run, f"plugin/text/text?run={run.run_dir.name}&tag={tag}")


def ask(run: LiveRun, page: str) -> str:
    """What TensorBoard serves; empty before it does."""
    found = re.search(r"TensorBoard  (http://[^#]+)/#", run.terminal)
    assert found, run.terminal
    try:
        with urllib.request.urlopen(f"{found[1]}/data/{page}", timeout=10) as reply:
            return str(json.loads(reply.read()))
    except (urllib.error.URLError, ValueError):  # not up yet, or no such tag yet
        return ""


def counts(run: LiveRun) -> dict[str, tuple[int, int]]:
    """(wanted, live) of each pool; (-1, -1) where somebody starts or leaves."""
    return {
        pool["pool"]: (pool["wanted"], pool["live"])
        if pool["starting"] == pool["draining"] == 0
        else (-1, -1)
        for pool in run.now()["pools"]
    }


def generators(run_dir: Path, condition: str) -> set[str]:
    """Who took part in groups that fulfil the condition."""
    with contextlib.closing(sqlite3.connect(run_dir / "store.sqlite")) as store:
        query = (
            "SELECT DISTINCT transitions.generator FROM transitions JOIN groups USING (group_id)"
        )
        return {name for (name,) in store.execute(f"{query} WHERE {condition}")}


def test_a_stopped_process_is_silent_with_its_cause_and_the_remedy(story: Story) -> None:
    for process in LOST:
        member = story.told[process]
        assert member["state"] == "silent"
        remedy = f"stopped by a signal; kill -CONT {member['pid']} continues it"
        assert remedy in member["waits_for"]


def test_losses_show_in_status_and_tensorboard_within_seconds(
    story: Story,
) -> None:
    assert len(story.seen_after_s) == 9
    assert statistics.median(story.seen_after_s.values()) < VISIBLE_S, story.seen_after_s


def test_nothing_is_lost_and_nothing_is_left(story: Story) -> None:
    rows = story.run.rows
    assert story.run.audit()["problems"] == []
    assert [row["step"] for row in rows if row["step"]] == list(range(1, rows[-1]["step"] + 1))
    assert max(row["staleness/max_versions"] for row in rows[1:]) <= 2
    assert (story.run.processes(), story.leaked) == ([], set())


def test_every_life_has_its_weights_from_files(story: Story) -> None:
    assert {name.partition("_")[0] for name in story.weight_files} == {"version"}
    assert {Path(name).suffix for name in story.weight_files} == {".safetensors"}
    probes = [row["weights/probe_abs_max"] for row in story.run.rows[1:]]
    # 0 is possible: the engine of transformers computes as the learner does. So each push has to
    # change the log-probs of the engine as it changes those of the learner.
    assert max(probes) < 1e-3
    lines = (story.run.run_dir / "pushes.jsonl").read_text().splitlines()
    probed = [push["probed"] for push in map(json.loads, lines) if push.get("probed")]
    followed = [probe["followed"] for probe in probed if probe.get("followed") is not None]
    assert followed
    assert min(followed) > 0.99
    assert list((story.run.run_dir / "weights").iterdir()) == []


def test_pools_are_scaled_one_by_one_while_the_learner_continues(story: Story) -> None:
    assert "generators.small: wanted 0; now live" in story.scaled
    assert len(set(story.learner_pids)) == 1
    trainers = generators(story.run.run_dir, f"purpose='train' AND {GENERATING}")
    assert trainers == {BIG, "generator-big-1", SMALL_ONE}


def test_evaluations_wait_for_their_pool_and_are_made_when_it_is_back(story: Story) -> None:
    waited = range(0, story.without_judge + 1, 8)
    evaluated = [row for row in story.run.rows if row["step"] in waited]
    assert len(evaluated) == len(waited) >= 2
    assert all(row["eval/num_samples"] == 4 for row in evaluated)
    assert all(row["eval/version_mean"] >= row["step"] for row in evaluated)
    judges = generators(story.run.run_dir, f"purpose='eval' AND {GENERATING}")
    assert judges == {JUDGE}
