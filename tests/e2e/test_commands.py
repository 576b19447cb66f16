"""Every command, as a person types it, on one run of the embedded default; it is taken up again
where a test finds it ended.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_support import LiveRun
from typer.testing import CliRunner
from warm_processes import run_command

from async_rl.launchers.cli import app

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

_COMMAND = str(Path(sys.executable).with_name("async-rl"))
QUICK = (
    "conf=ppo_code",
    "generation.engine=hf",
    "buffer.groups_per_step=4",
    "generation.group_size=4",
    "evaluation.every_steps=0",
    "checkpoint.every_steps=20",
    # Else the samples of a step are gone after the next checkpoint.
    "recording=full",
    "num_steps=100000",
)


def tell(*arguments: str | Path, code: int = 0, folder: Path | None = None) -> str:
    """What `async-rl` prints, called in the folder."""
    done = run_command(arguments, folder=folder)
    assert done.returncode == code, (
        f"async-rl {' '.join(map(str, arguments))}\n{done.stdout}{done.stderr}"
    )
    return done.stdout + done.stderr


class Shared:
    """The one run of this file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lives: list[LiveRun] = []

    def alive(self, *settings: str) -> LiveRun:
        """The run, with at least two steps behind it."""
        if not self._lives or self._lives[-1].process.poll() is not None:
            self._lives.append(
                LiveRun(
                    self._folder, *(settings if self._lives else QUICK), resumes=bool(self._lives)
                )
            )
        run = self._lives[-1]
        run.until(lambda: run.step >= 2 and bool(run.now()["members"]), "step 2")
        return run

    def ended(self, *, steps: int) -> LiveRun:
        """The run, with so many steps behind it and at rest, so that it takes no processor time
        from what is asked about it.
        """
        run = self._lives[-1] if self._lives else self.alive()
        if run.step < steps:
            run = self.alive()
            run.until(lambda: run.step >= steps, f"step {steps}")
        if run.process.poll() is None:
            tell("stop", run.run_dir, "--now")
            assert run.wait() == 0
        return run

    def end(self) -> None:
        for life in self._lives:
            life.end()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    found = Shared(tmp_path_factory.mktemp("shared") / "runs")
    yield found
    found.end()


def test_status_shows_each_process_and_the_same_as_json(shared: Shared) -> None:
    run = shared.alive()
    text = tell("status", run.run_dir)
    assert re.search(r"^learner-0 +\d+ +\w+", text, re.MULTILINE)
    assert re.search(
        r"groups: prompt → issued \d+ → generating \d+ → ready \d+ → leased \d+ → trained in"
        r" step \d+",
        text,
    )
    assert "reward " in text
    told = run.told()
    assert {member["name"] for member in told["members"]} == {
        "buffer",
        "generator-0",
        "learner-0",
        "verifier-0",
    }
    assert (told["is_running"], told["num_steps"]) == (True, 100000)


def test_status_watch_draws_until_it_is_left(shared: Shared) -> None:
    run = shared.alive()
    with subprocess.Popen(
        [_COMMAND, "status", str(run.run_dir), "--watch"], stdout=subprocess.PIPE, text=True
    ) as watching:
        assert watching.stdout is not None
        heads = []
        for line in watching.stdout:
            heads += re.findall(r"^run +step (\d+) of 100000", line)
            if len(heads) == 2:
                break
        watching.send_signal(signal.SIGINT)
        watching.stdout.read()
        assert watching.wait(30) == 0
    assert int(heads[1]) >= int(heads[0])


def test_rollouts_and_the_ledger_tell_of_the_same_groups(shared: Shared) -> None:
    run = shared.alive()
    step = int(run.told()["step"])
    ids = re.findall(
        r"group (\d+), sample", tell("rollouts", run.run_dir, "--step", str(step), "--num", "9")
    )
    assert len(ids) == 4
    ledger = json.loads(tell("ledger", run.run_dir, "--step", str(step), "--json"))
    assert {int(i) for i in ids} == {group["group_id"] for group in ledger}
    for option in ("--best", "--worst", "--failed"):
        rewards = [
            float(r)
            for r in re.findall(
                r"^reward (\S+) \(",
                tell("rollouts", run.run_dir, option, "--num", "20"),
                re.MULTILINE,
            )
        ]
        assert rewards == sorted(rewards, reverse=option == "--best") or option == "--failed"
        assert rewards
    assert run.audit()["problems"] == []


def test_logs_are_those_of_the_process_that_is_named(shared: Shared) -> None:
    run = shared.alive()
    assert "generator-0 serves at" in tell("logs", run.run_dir, "--num", "1000")
    assert "serves at" not in tell("logs", run.run_dir, "generator-0")
    assert "did you mean learner-0" in tell("logs", run.run_dir, "learner", code=2)


def test_a_run_is_stopped_exported_and_resumed(shared: Shared, tmp_path: Path) -> None:
    run = shared.alive()
    told = tell("stop", run.run_dir)
    stopped_at = int(re.search(r"is not running \(stopped\); last step (\d+) of 100000", told)[1])  # type: ignore[index]
    assert run.wait() == 0
    assert f"last step {stopped_at} of" in tell("status", run.run_dir)
    assert f"after step {stopped_at} is in" in tell("export", run.run_dir, tmp_path / "model")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (tmp_path / "model").iterdir()
    }
    again = shared.alive()
    assert "resuming; no setting has changed" in again.terminal
    again.until(lambda: again.step > stopped_at, "a step beyond those before")
    assert "is ending" in tell("stop", run.run_dir, "--now")
    assert again.wait() == 0
    assert again.processes() == []


def test_a_task_that_init_wrote_is_checked_verified_and_runs(tmp_path: Path) -> None:
    task = tmp_path / "my_task"
    assert "run it:" in tell("init", task)
    assert "512" in tell("data", "check", task / "train.jsonl", f"conf={task / 'conf.yaml'}")
    assert "512" in tell("verify", task / "train.jsonl", "--references")
    settings = (
        "generation.engine=hf",
        "buffer.groups_per_step=2",
        "generation.group_size=4",
        "evaluation.every_steps=0",
        "num_steps=2",
    )
    run = LiveRun(tmp_path, f"conf={task / 'conf.yaml'}", *settings)
    try:
        assert run.wait() == 0, run.terminal
        assert [row["step"] for row in run.rows] == [1, 2]
    finally:
        run.end()


def test_a_configuration_of_verl_is_translated_into_one_that_composes(tmp_path: Path) -> None:
    source = tmp_path / "theirs.yaml"
    source.write_text(
        "actor_rollout_ref:\n  rollout: {n: 4}\nalgorithm: {adv_estimator: grpo}\ntrainer:"
        " {total_training_steps: 7}\n"
    )
    told = tell("migrate", source)
    assert "-> generation.group_size=4" in told
    assert f"written: {tmp_path / 'theirs.async_rl.yaml'}" in told


def test_the_doctor_looks_at_the_machine_it_is_on() -> None:
    told = tell("doctor")
    assert re.search(r"^ok +cores", told, re.MULTILINE), told


DOCS = Path(__file__).parents[2] / "docs"
ELSEWHERE = (
    "launch",  # tests/repo/test_documented_launches.py
    *("stop", "resume", "export", "verifier", "init", "scale", "eval"),
    *("view", "tensorboard", "replay", "compare"),
)
"""Commands that start or end something, or serve until Ctrl-C: tests of their own run them."""
EXAMPLES = {
    "ppo_trainer.yaml": (
        "actor_rollout_ref:\n  rollout: {n: 4}\nalgorithm: {adv_estimator: grpo}\ntrainer:"
        " {total_training_steps: 7}\n"
    ),
    "experiment.yaml": (
        "group_size: 4\nppo: {ppo_n_minibatches: 4}\ndataset: {train_bs_n_seqs: 16}\n"
    ),
    "completions.jsonl": (
        '{"id": "a", "prompt": "", "tests": [{"kind": "call", "function": "f", "args": [2],'
        ' "expected": 4}], "completion": "def f(x): return 2 * x"}\n'
    ),
}
"""Files that the documents speak of."""
LENGTHS = {"data": 3, "migrate": 2, "plan": 2, "verify": 2}
"""Words of a command with a file; without one a sentence names the command only."""


def documented_commands(values: dict[str, str]) -> list[list[str]]:
    """Every use of a command in docs/ that can be run here, with what the reader puts in for the
    words in capitals; each once.
    """
    found: dict[tuple[str, ...], None] = {}
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text()
        blocks = re.findall(r"^```.*?\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
        lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
        for line in (*lines, *re.findall(r"`(async-rl [^`\n]+)`", text)):
            words = shlex.split(line.partition("  ")[0]) if line.startswith("async-rl ") else []
            if (
                len(words) > 1
                and "..." not in line
                and words[1] not in ELSEWHERE
                # The first two do not end; the last changes the run, and has tests of its own.
                and not {"--watch", "--follow", "--drop"} & set(words)
            ):
                found[tuple(values.get(word, word) for word in words[1:])] = None
    return [list(words) for words in found]


def test_commands_in_the_documents_run_as_they_stand_there(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shared.ended(steps=12)  # explain and plan need 8
    folder = run.run_dir.parents[1]
    tell("init", "my_task", folder=folder)
    model = re.search(r'path: "(.+)"', (folder / "my_task" / "conf.yaml").read_text())
    assert model
    for name, text in EXAMPLES.items():
        (folder / name).write_text(text)
    (folder / "problems.jsonl").write_bytes((folder / "my_task" / "train.jsonl").read_bytes())
    prompt = json.loads(tell("ledger", run.run_dir, "--step", "1", "--json"))[0]["prompt_id"]
    values = {
        "RUN": "run",
        "my-run": "run",
        **dict.fromkeys(("mine", "graded", "posting", "game", "slow", "faster"), "run"),
        "PROCESS": "generator-0",
        "FILE": "problems.jsonl",
        "ID": prompt,
    }
    values["model.path=/models/mine"] = f"model.path={model[1]}"
    # Steps that the reader's run still has; of this one the newest is sure to be stored.
    values |= dict.fromkeys(("12", "40", "60"), str(run.step))
    commands = documented_commands(values)
    assert {words[0] for words in commands} >= {
        "status",
        "rollouts",
        "logs",
        "ledger",
        "doctor",
        "verify",
        "data",
        "migrate",
    }
    complete = [
        words
        for words in commands
        if len(words) >= LENGTHS.get(words[0], 1)
        and not any(word.startswith("/data/") for word in words)
        # A calibration is a run of its own, which takes a minute of the suite.
        and not any(word.startswith(("--calibrate", "profile=")) for word in words)
    ]
    assert ["migrate", "experiment.yaml"] in complete
    monkeypatch.chdir(folder)
    for words in complete:
        # In this process, which has imported what 30 processes would import: about a second each.
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, (words, done.output, done.exception)
        # A command that finds nothing ends well too, but shows a reader nothing. In a step of a
        # run that has learned, no sample may have failed.
        if (words[0] == "rollouts" or "--step" in words) and "--failed" not in words:
            assert not re.match("no such rollout|no group matches", done.output), words
