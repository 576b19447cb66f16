"""Commands as a person types them, on a run that has ended."""

import json
import re
import shlex
from pathlib import Path

import pytest
from documents import DOCS, code_lines, spans
from resumed_run import LAST, Resumed
from typer.testing import CliRunner
from warm_processes import run_command

from async_rl.launchers.cli import application

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def tell(*arguments: str | Path, code: int = 0, folder: Path | None = None) -> str:
    """What `async-rl` prints, called in the folder."""
    done = run_command(arguments, folder=folder)
    assert done.returncode == code, (
        f"async-rl {' '.join(map(str, arguments))}\n{done.stdout}{done.stderr}"
    )
    return done.stdout + done.stderr


def test_rollouts_and_the_ledger_tell_of_the_same_groups(resumed: Resumed) -> None:
    shown = tell("rollouts", resumed.directory, "--step", str(LAST), "--num", "9")
    ids = re.findall(r"group (\d+), sample", shown)
    assert len(ids) == 4
    ledger = json.loads(tell("ledger", resumed.directory, "--step", str(LAST), "--json"))
    assert {int(i) for i in ids} == {group["group_id"] for group in ledger}
    for option in ("--best", "--worst", "--failed"):
        shown = tell("rollouts", resumed.directory, option, "--num", "20")
        rewards = [float(r) for r in re.findall(r"^reward (\S+) \(", shown, re.MULTILINE)]
        assert rewards == sorted(rewards, reverse=option == "--best") or option == "--failed"
        assert rewards


def test_the_certificate_of_a_run_that_was_killed_and_resumed_holds(resumed: Resumed) -> None:
    certificate = json.loads(tell("certify", resumed.directory, "--json"))
    verdicts = {each["promise"]: each["verdict"] for each in certificate["statements"]}
    assert "broken" not in verdicts.values()
    for promise in (
        "every push reached every generator, or its absence is listed",
        "each generator computes with the weights that it was sent",
        "each position of the data order was issued exactly once",
        "each position was issued for the prompt of data.order",
        "the code, packages and settings of each start are recorded",
        "the prompts and the weights that the run started from are recorded",
    ):
        assert verdicts[promise] == "holds", certificate
    assert "verdict" in tell("certify", resumed.directory)


def test_logs_are_those_of_the_process_that_is_named(resumed: Resumed) -> None:
    assert "generator-0 serves at" in tell("logs", resumed.directory, "--num", "1000")
    assert "serves at" not in tell("logs", resumed.directory, "generator-0")
    assert "did you mean learner-0" in tell("logs", resumed.directory, "learner", code=2)


def test_an_ended_run_has_a_status_and_is_exported(resumed: Resumed, tmp_path: Path) -> None:
    assert f"last step {LAST} of {LAST}" in tell("status", resumed.directory)
    assert f"after step {LAST} is in" in tell("export", resumed.directory, tmp_path / "model")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (tmp_path / "model").iterdir()
    }


ELSEWHERE = (
    "launch",  # tests/repo/test_documented_launches.py
    *("stop", "resume", "export", "verifier", "init", "scale", "eval", "convert"),
    *("view", "replay", "compare", "serve"),
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
RUNS = ("RUN", "my-run", "mine", "graded", "posting", "game", "slow", "faster", "claude", "codex")
LENGTHS = {"data": 3, "migrate": 2, "plan": 2, "verify": 2}
"""Words of a command with a file; without one a sentence names the command only."""


def documented_commands(values: dict[str, str]) -> list[list[str]]:
    """Every use of a command in docs/ that can be run here, with what the reader puts in for the
    words in capitals; each once.
    """
    found: dict[tuple[str, ...], None] = {}
    for path in sorted(DOCS.rglob("*.md")):
        for line in (*code_lines(path), *spans(path)):
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
    resumed: Resumed, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = resumed.run
    folder = run.run_dir.parents[1]
    assert "run it:" in tell("init", "my_task", folder=folder)
    model = re.search(r'path: "(.+)"', (folder / "my_task" / "conf.yaml").read_text())
    assert model
    for name, text in EXAMPLES.items():
        (folder / name).write_text(text)
    (folder / "problems.jsonl").write_bytes((folder / "my_task" / "train.jsonl").read_bytes())
    prompt = json.loads(tell("ledger", run.run_dir, "--step", "1", "--json"))[0]["prompt_id"]
    values = dict.fromkeys(RUNS, "run")
    values |= {"PROCESS": "generator-0", "FILE": "problems.jsonl", "ID": prompt}
    values["model.path=/models/mine"] = f"model.path={model[1]}"
    # Steps that the reader's run still has; of this one the newest is sure to be stored.
    values |= dict.fromkeys(("12", "40", "60"), str(run.step))
    commands = documented_commands(values)
    assert {words[0] for words in commands} >= {"status", "ledger", "doctor", "verify", "migrate"}
    complete = [
        words
        for words in commands
        if len(words) >= LENGTHS.get(words[0], 1)
        and not any(word.startswith("/data/") for word in words)
    ]
    assert ["migrate", "experiment.yaml"] in complete
    monkeypatch.chdir(folder)
    for words in complete:
        # In this process, which has imported what 30 processes would import: about a second each.
        done = CliRunner().invoke(application(), words)
        # 3: the examples name no model, so the written file is not complete.
        expected = 3 if words[0] == "migrate" else 0
        assert done.exit_code == expected, (words, done.output, done.exception)
        # A command that finds nothing ends well too, but shows a reader nothing. In a step of a
        # run that has learned, no sample may have failed.
        if (words[0] == "rollouts" or "--step" in words) and "--failed" not in words:
            assert not re.match("no such rollout|no group matches", done.output), words
