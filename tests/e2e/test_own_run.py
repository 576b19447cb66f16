"""A run of a user's own parts, from Python: rows in verl's form and from a data source, a rollout
of two turns, a reward that fails on some rows, an engine, a loss, an advantage, a correction.

It is started, followed, read, stopped and resumed by `import async_rl`, while the command
line watches it.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e_support import async_rl as command
from tiny_model import tiny_model

import async_rl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = Path(sys.executable).with_name("async-rl")
EXAMPLE = Path(__file__).resolve().parents[1] / "plugin_example"
FAILURES = {
    "raises": "mine raised ZeroDivisionError: my mistake",
    "exits": "mine made its process exit with code 7",
    "hangs": "mine gave no score within 3 s (timeouts.group_s / 12)",
    "nan": "mine returned nan",
    "text": "mine returned '0.5'",
}
SEEN_STEPS = 8
"""Six steps train every row that can be scored once: two groups each."""
MINE = '''
"""The policy writes a few tokens, which are replaced by an answer that is right for even rows
and wrong for odd ones, so every score is known."""

async def answers(talk):
    await talk.write(max_tokens=4)
    talk.tell("again\\n")
    await talk.write(max_tokens=4)
    if "reward_model" in talk.row:
        truth = int(talk.row["reward_model"]["ground_truth"])
        return f"It is\\n#### {truth + talk.row['extra_info']['index'] % 2}"
    number = int(talk.row["id"].rpartition("-")[2])
    return f"So:\\n```python\\ndef f(x): return [n + {number + number % 2} for n in x]\\n```"

def mine(sample):
    import os, time
    how = sample.row.get("how", "good")
    if how == "raises":
        raise ZeroDivisionError("my mistake")
    if how == "exits":
        os._exit(7)
    if how == "hangs":
        time.sleep(1000)
    return {"nan": float("nan"), "text": "0.5"}.get(how, {"score": 0.5, "length": 3.0})
'''
WORDS = "Ann has apples and buys more. How many does she have? Add 0 to every number."
SETTINGS: dict[str, Any] = {
    "generation.engine": "counted",
    "generation.group_size": 2,
    "generation.max_attempts": 2,
    "algorithm.policy_loss": "plugin",
    "algorithm.policy_loss.fn": "plain_ratio",
    "algorithm.policy_loss.correction": "plugin",
    "algorithm.policy_loss.correction.fn": "half",
    "algorithm.advantage": "plugin",
    "algorithm.advantage.fn": "above_mean",
    "buffer.groups_per_step": 2,
    "data": {"max_prompt_tokens": 64, "max_response_tokens": 24, "order": "sequential"},
    "evaluation": {"every_steps": 2, "num_samples": 2},
    "monitoring.tensorboard_port": None,
    "num_steps": 100_000,
    "recording": "full",
    "rollout.max_turns": 2,
    "timeouts.group_s": 36,
}


@dataclass
class Own:
    """What was seen of the run while it lived, and the run after its end."""

    resumed: async_rl.Run
    steps: list[int]
    status: Any
    seen: dict[str, Any]
    watched: list[str]
    samples: list[Any]
    failed: list[int]
    ended: Any
    left: list[int]


@pytest.fixture(scope="session")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Own]:
    folder = tmp_path_factory.mktemp("own")
    with pytest.MonkeyPatch.context() as patch:
        installed = install(folder)
        patch.syspath_prepend(str(installed))
        patch.setenv("PYTHONPATH", str(installed))
        run = async_rl.launch("grpo_code", SETTINGS | files(folder))
        try:
            yield follow(run)
        finally:
            run.stop(now=True)


def install(folder: Path) -> Path:
    """Return the folder in which pip has installed the package of plug-ins."""
    shutil.copytree(EXAMPLE, folder / "source")
    options = ["-q", "--no-deps", "--no-build-isolation", "--target", str(folder / "installed")]
    install = [sys.executable, "-m", "pip", "install", *options, str(folder / "source")]
    subprocess.run(install, check=True, timeout=120)
    return folder / "installed"


def files(folder: Path) -> dict[str, Any]:
    """Write the model, the rows and the functions; return the settings that name them."""
    (folder / "mine.py").write_text(MINE)
    rows = [row(index, "good") for index in range(7)]
    bad = [row(10 + index, how) for index, how in enumerate(FAILURES)]
    pq.write_table(pa.Table.from_pylist(rows[:4] + bad), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows[4:]), folder / "val.parquet")
    return {
        "model.path": str(tiny_model(folder / "model", WORDS)),
        "data.train_files": ["sums", str(folder / "train.parquet")],
        "data.val_files": str(folder / "val.parquet"),
        "rollout.fn": f"{folder}/mine.py:answers",
        "reward.terms.tests": "tests",
        "reward.terms.mine": f"{folder}/mine.py:mine",
        "reward.terms.mine.weight": 2,
        "output_dir": str(folder),
        "run_name": "mine",
    }


def row(index: int, how: str) -> dict[str, Any]:
    question = f"Ann has {index} apples and buys {index + 2} more. How many does she have?"
    return {
        "id": f"ann-{index}" if how == "good" else how,
        "how": how,
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(2 * index + 2)},
        "extra_info": {"split": "train", "index": index},
    }


def follow(run: async_rl.Run) -> Own:
    steps = run.steps()
    seen_steps = [next(steps)["step"] for _ in range(SEEN_STEPS)]
    while len(dropped(run)) < len(FAILURES):
        seen_steps.append(next(steps)["step"])
    status = run.status()
    shown = command("status", str(run.directory), "--json")
    assert shown.returncode == 0, shown.stderr
    watched = watch(run)
    samples = run.rollouts(step=1)
    failed = [sample.index for sample in run.rollouts(step=1, failed=True)]
    ended = run.stop()
    left = [member.pid for member in status.members if psutil.pid_exists(member.pid)]
    seen_steps += [step["step"] for step in steps]
    # A person repairs the function. Else the resumed run may have no prompt left but those that it
    # fails on, and would take them for an outage of the scoring for minutes.
    mine = run.directory.parent / "mine.py"
    mine.write_text(MINE.replace('sample.row.get("how", "good")', '"good"'))
    again = async_rl.open_run(run.directory)
    resumed = async_rl.resume(again, {"num_steps": ended.step + 2})
    with pytest.raises(async_rl.ConfigError, match="is running"):
        async_rl.resume(resumed.directory)
    assert resumed.wait(timeout_s=120).state is async_rl.RunState.FINISHED
    return Own(
        resumed=resumed,
        steps=seen_steps,
        status=status,
        seen=json.loads(shown.stdout),
        watched=watched,
        samples=samples,
        failed=failed,
        ended=ended,
        left=left,
    )


def watch(run: async_rl.Run) -> list[str]:
    """Return two heads that `async-rl status --watch` draws until Ctrl-C."""
    with subprocess.Popen(
        [PROGRAM, "status", str(run.directory), "--watch"], stdout=subprocess.PIPE, text=True
    ) as watching:
        assert watching.stdout is not None
        heads: list[str] = []
        for line in watching.stdout:
            heads += [line] if line.startswith("mine ") else []
            if len(heads) == 2:
                break
        watching.send_signal(signal.SIGINT)
        watching.stdout.read()
        assert watching.wait(30) == 0
    return heads


def groups_of(run: async_rl.Run, condition: str) -> list[tuple[str, float | None, str]]:
    """(the row's id, mean reward, message) of each group that fulfils the condition."""
    with contextlib.closing(sqlite3.connect(run.directory / "store.sqlite")) as store:
        row_id = "substr(prompt_id, instr(prompt_id, '/') + 1)"
        query = f"SELECT {row_id}, reward_mean, message FROM groups WHERE {condition}"
        return store.execute(query).fetchall()


def dropped(run: async_rl.Run) -> dict[str, str]:
    """What the groups say that were dropped because the reward function failed."""
    found = groups_of(run, "state='dropped' AND reason='reward_failed'")
    return {name: message for name, _, message in found}


def test_steps_are_followed_and_the_command_line_sees_the_same_run(own: Own) -> None:
    assert own.steps == list(range(own.ended.step + 1))
    assert (own.status.state, own.status.is_running) == (async_rl.RunState.RUNNING, True)
    roles = {member.role for member in own.status.members}
    assert roles == {"learner", "buffer", "generator", "verifier"}
    assert (own.seen["state"], own.seen["run_name"]) == ("running", "mine")
    names = {member["name"] for member in own.seen["members"]}
    assert names == {"buffer", "generator-0", "learner-0", "verifier-0"}
    assert all("of 100000" in head for head in own.watched)


def test_samples_are_read_while_the_run_lives(own: Own) -> None:
    assert len(own.samples) == 4
    assert all(sample.prompt and sample.step == 1 for sample in own.samples)
    assert own.failed == [s.index for s in own.samples if not s.score.is_passed]


def test_a_stopped_run_has_left_and_is_resumed_to_its_end(own: Own) -> None:
    assert (own.ended.state, own.ended.cause) == (async_rl.RunState.STOPPED, "")
    assert own.left == []
    assert own.resumed.metrics()["step"][-1] == own.ended.step + 2
    assert own.resumed.config.buffer.groups_per_step == 2


def test_rows_of_both_sources_are_answered_judged_and_trained(own: Own) -> None:
    """A program in the sandbox, or a number; 2 * 0.5 is the reward of one's own."""
    before = f"state='trained' AND train_version < {own.ended.step}"
    trained = {name: reward for name, reward, _ in groups_of(own.resumed, before)}
    programs = {f"add-{number}": 2.0 - number % 2 for number in range(8)}
    assert trained == programs | {f"ann-{number}": 2.0 - number % 2 for number in range(4)}
    shown = command("rollouts", str(own.resumed.directory), "--num", "40").stdout
    assert "<user>Ann has 2 apples and buys 4 more. How many does she have?" in shown
    assert "<assistant>" in shown


def test_held_out_rows_are_evaluated_and_the_checkpoint_alone_has_the_same_figures(
    own: Own,
) -> None:
    metrics = own.resumed.metrics()
    passed = [value for value in metrics["eval/pass_at_1"] if not math.isnan(value)]
    assert passed == pytest.approx([2 / 3] * len(passed))
    assert len(passed) >= 3
    names = {name for name, *_ in groups_of(own.resumed, "purpose='eval'")}
    assert names == {"ann-4", "ann-5", "ann-6"}
    # Not in a warm process, which has started without the path of the plug-ins.
    words = [PROGRAM, "eval", str(own.resumed.directory), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    alone = json.loads(done.stdout)
    assert (alone["version"], alone["failed_prompts"]) == (own.ended.step + 2, 0)
    for name in ("greedy_pass", "pass_at_1", "pass_at_k"):
        assert alone[f"eval/{name}"] == pytest.approx(2 / 3)
        assert metrics[f"eval/{name}"][0] == pytest.approx(2 / 3)


def test_only_the_turns_of_the_policy_are_trained_and_parts_of_the_reward_are_named(
    own: Own,
) -> None:
    rows = (own.resumed.directory / "metrics.jsonl").read_text().splitlines()
    for row in map(json.loads, rows):
        if row["step"]:
            assert row["reward/mean"] == pytest.approx(row["reward/part/tests"] + 2 * 0.5)
            assert row["reward/part/mine.length"] == 3.0
            assert row["tokens/trained"] <= 4 * 8
            assert row["length/response_mean"] * 4 > row["tokens/trained"]


def test_a_reward_function_that_fails_in_every_way_costs_only_the_groups_it_fails_on(
    own: Own,
) -> None:
    said = dropped(own.resumed)
    assert said.keys() == FAILURES.keys()
    for how, sentence in FAILURES.items():
        assert f"RewardError: {sentence}" in said[how]


def test_the_engine_of_the_package_has_sampled(own: Own) -> None:
    assert (own.resumed.directory / "counted").is_file()
