"""A run of a user's own parts, from Python, on one device: rows in verl's form and from a data
source, a rollout of two turns, a reward that fails on a row, an engine, a loss, an advantage, a
correction.

The lines of docs/python.md start, follow and stop it, those of its notebook follow it too, and the
command line watches it. Its generator is killed while it sleeps. Then it is resumed.
"""

import contextlib
import io
import itertools
import json
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from documents import DOCS, python_blocks
from e2e_support import Attached, notebook, outputs
from e2e_support import async_rl as command
from tiny_model import tiny_model

import async_rl
from async_rl.core.machine import this_machine
from async_rl.launchers.api.launching import words_of
from async_rl.launchers.api.starting import checked_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROGRAM = Path(sys.executable).with_name("async-rl")
EXAMPLE = Path(__file__).resolve().parents[1] / "plugin_example"
FAILURE = "RewardError: mine raised ZeroDivisionError: my mistake"
SLEEPS = "generation sleeps: the learner uses the device"
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
    if sample.row.get("how", "good") == "raises":
        raise ZeroDivisionError("my mistake")
    return {"score": 0.5, "length": 3.0}
'''
WORDS = "Ann has apples and buys more. How many does she have? Add 0 to every number."
SETTINGS: dict[str, Any] = {
    "generation": {"engine": "counted", "group_size": 2, "max_attempts": 2},
    "algorithm.policy_loss": "plugin",
    "algorithm.policy_loss.fn": "plain_ratio",
    "algorithm.policy_loss.correction": "plugin",
    "algorithm.policy_loss.correction.fn": "half",
    "algorithm.advantage": "plugin",
    "algorithm.advantage.fn": "above_mean",
    "buffer.groups_per_step": 2,
    "data": {"max_prompt_tokens": 64, "max_response_tokens": 24, "order": "sequential"},
    "evaluation.every_steps": 2,
    "evaluation.num_samples": 2,
    # The learner uses the device long enough to be seen from outside, and changes little.
    "learner": {"epochs": 100, "optimizer": {"lr": 1e-6}},
    "placement": "colocated",
    "recording": "full",
    "rollout.max_turns": 2,
    "timeouts": {"group_s": 60, "call_s": 10},
}
"""In place of settings of the page, or with them."""


Own = SimpleNamespace
"""What was seen of the run while it lived, and the run after its end (`follow`)."""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Own]:
    folder = tmp_path_factory.mktemp("own")
    settings = SETTINGS | files(folder)
    launch = async_rl.launch

    def launch_own(conf: str, given: dict[str, Any]) -> async_rl.Run:
        checked_config(conf, words_of([], None, None, given), this_machine())
        return launch(conf, given | settings)

    with pytest.MonkeyPatch.context() as patch:
        installed = install(folder)
        patch.syspath_prepend(str(installed))
        patch.setenv("PYTHONPATH", str(installed))
        patch.chdir(folder)
        patch.setattr(async_rl, "launch", launch_own)
        try:
            yield follow(folder)
        finally:
            with contextlib.suppress(async_rl.ConfigError):
                async_rl.open_run(folder / "runs/from-python").stop(now=True)


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
    pq.write_table(pa.Table.from_pylist([*rows[:4], row(10, "raises")]), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows[4:]), folder / "val.parquet")
    return {
        "model.path": str(tiny_model(folder / "model", WORDS)),
        "data.train_files": ["sums", str(folder / "train.parquet")],
        "data.val_files": str(folder / "val.parquet"),
        "rollout.fn": f"{folder}/mine.py:answers",
        "reward.terms.tests": "tests",
        "reward.terms.mine": f"{folder}/mine.py:mine",
        "reward.terms.mine.weight": 2,
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


def follow(folder: Path) -> Own:
    blocks = python_blocks(DOCS / "python.md")
    stop = next(index for index, block in enumerate(blocks) if "run.stop()" in block)
    printed = io.StringIO()
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(printed):
        for block in blocks[:stop]:
            exec(block, names)
    run: async_rl.Run = names["run"]
    live = Attached(run.directory)

    def sleeps() -> bool:
        return bool(live.member("generator-0").get("waits_for") == SLEEPS)

    live.until(sleeps, "a handover")
    killed = live.pid_of("generator-0")
    live.kill("generator-0")
    live.serves_again("generator-0", killed)
    step = live.step
    live.until(lambda: live.step >= step + 2 and sleeps(), "another handover")
    status = run.status()
    shown = command("status", str(run.directory), "--json")
    assert shown.returncode == 0, shown.stderr
    watched = watch(run)
    samples = run.rollouts(step=1)
    failed = [sample.index for sample in run.rollouts(step=1, failed=True)]
    in_notebook = read_in_notebook(blocks, folder)
    live.until(lambda: live.step >= 8 and dropped(run) != {}, "each row, also that which fails")
    pids = [member.pid for member in run.status().members]
    live.until(sleeps, "a step to be stopped in")
    with contextlib.redirect_stdout(printed):
        for block in blocks[stop:]:
            exec(block, names)
    ended = run.status()
    left = [pid for pid in pids if psutil.pid_exists(pid)]
    steps = [step["step"] for step in run.steps()]
    # A person repairs the function.
    mine = folder / "mine.py"
    mine.write_text(MINE.replace('sample.row.get("how", "good")', '"good"'))
    resumed = async_rl.resume(run, {"num_steps": ended.step + 2})
    with pytest.raises(async_rl.ConfigError, match="is running"):
        async_rl.resume(resumed.directory)
    assert resumed.wait(timeout_s=120).state is async_rl.RunState.FINISHED
    return Own(
        resumed=resumed,
        printed=printed.getvalue().splitlines(),
        in_notebook=in_notebook,
        steps=steps,
        status=status,
        seen=json.loads(shown.stdout),
        watched=watched,
        samples=samples,
        failed=failed,
        ended=ended,
        left=left,
    )


def read_in_notebook(blocks: list[str], folder: Path) -> list[str]:
    """Execute the notebook, which has a run of the page's settings, with this one, and without its
    stop; return what it shows.
    """
    found, cells = notebook("run.ipynb")
    launches, stops = cells[0].source, next(c for c in cells if "run.stop()" in c.source).source
    # What is not executed in the notebook is executed in the page.
    assert launches.replace('"notebook"', '"from-python"') == f"{blocks[0]}run.name"
    assert any(stops in block for block in blocks)
    for cell in cells:
        if cell.source == launches:
            cell.source = OPEN
        elif cell.source == stops:
            cell.source = ""
    return outputs(found, folder)


OPEN = """
import async_rl
run = async_rl.open_run('runs/from-python')
# The notebook's own run evaluates nothing, so it has no row before its first step.
rows = type(run).steps
type(run).steps = lambda run: (row for row in rows(run) if row["step"])
"""


def watch(run: async_rl.Run) -> list[str]:
    """Return two heads that `async-rl status --watch` draws until Ctrl-C."""
    with subprocess.Popen(
        [PROGRAM, "status", str(run.directory), "--watch"], stdout=subprocess.PIPE, text=True
    ) as watching:
        assert watching.stdout is not None
        lines = (line for line in watching.stdout if line.startswith("from-python "))
        heads = list(itertools.islice(lines, 2))
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


def test_the_lines_of_the_page_run_from_start_to_end(own: Own) -> None:
    error, first, *printed = own.printed
    assert error.startswith("num_step=20: there is no such setting; did you mean num_steps")
    assert first.startswith("0 ")
    assert any(line.startswith("running ") for line in printed)
    assert f"stopped at step {own.ended.step}" in printed
    assert printed[-3:] == ["wrong_answer", "pass ", "wrong_answer f(2) returned 4, not 5"]


def test_every_cell_of_the_notebook_runs_in_a_kernel(own: Own) -> None:
    assert "step 3" in own.in_notebook[1]
    assert "generators: 2 wanted" in own.in_notebook[3]
    assert any("image/svg+xml" in text for text in own.in_notebook)
    judged = "\n".join(own.in_notebook[-5:])
    verdicts = ("pass", "wrong_answer", "timeout", "runtime_error")
    assert [verdict for verdict in verdicts if verdict not in judged] == []


def test_handovers_continue_after_a_sleeping_generator_died_and_end_in_order_during_a_step(
    own: Own,
) -> None:
    live = Attached(own.resumed.directory)
    for seconds in (
        "blocked_s/generator/generation_sleeps",
        "stage_s/learner/moving_to_the_device",
    ):
        assert any(row.get(seconds, 0.0) > 0 for row in live.rows), seconds
    assert max(row["staleness/max_versions"] for row in live.rows[1:]) <= 2
    assert max(row["weights/probe_abs_max"] for row in live.rows[1:]) < 1e-3
    assert live.audit()["problems"] == []


def test_steps_are_followed_and_the_command_line_sees_the_same_run(own: Own) -> None:
    assert own.steps == list(range(own.ended.step + 1))
    assert (own.status.state, own.status.is_running) == (async_rl.RunState.RUNNING, True)
    roles = {member.role for member in own.status.members}
    assert roles == {"learner", "buffer", "generator", "verifier"}
    assert (own.seen["state"], own.seen["run_name"]) == ("running", "from-python")
    names = {member["name"] for member in own.seen["members"]}
    assert names == {"buffer", "generator-0", "learner-0", "verifier-0"}
    assert all("of 1000" in head for head in own.watched)


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
    """A program in the sandbox, or a number; 2 * 0.5 is the reward of one's own. The engine of the
    package has sampled them.
    """
    assert (own.resumed.directory / "counted").is_file()
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
    # A machine that is too busy for the limits of a score leaves prompts out.
    is_whole = metrics["eval/num_samples"] == 3 * 2
    passed = metrics["eval/pass_at_1"][is_whole]
    assert passed == pytest.approx(np.full(len(passed), 2 / 3))
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
        assert metrics[f"eval/{name}"][is_whole][0] == pytest.approx(2 / 3)


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


def test_a_reward_function_that_fails_costs_only_the_groups_it_fails_on(own: Own) -> None:
    said = dropped(own.resumed)
    assert said.keys() == {"raises"}
    assert FAILURE in said["raises"]
