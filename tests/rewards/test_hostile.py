from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest
from corpus_table import CASES, HONEST, LEVELS, Case, Host, can_become_other, other_user, verdict_of
from rewards_support import Jail

from async_rl.core.types import CallTest, Verdict
from async_rl.sandbox.protocol import NAMESPACES

SEES_NOTHING = "import os\ndef f(x):\n    return os.listdir('.') or 9"


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    made = Host(tmp_path_factory.mktemp("host"))
    yield made
    made.close()


@pytest.mark.parametrize("case", [*CASES, *HONEST], ids=lambda case: f"{case.family}: {case.name}")
def test_program_gets_its_right_verdict_and_harms_nothing(
    each_jail: Jail, host: Host, case: Case
) -> None:
    if not case.works_at(each_jail.cells.level):
        pytest.skip("the scratch needs namespaces")
    with host.unchanged(case.name):
        verdict = verdict_of(each_jail, case)
        assert verdict in case.right, verdict
    assert each_jail.cells.num_replaced == 0
    # An honest program passes in the cell, and nothing that the hostile one wrote is left.
    if each_jail.cells.level == NAMESPACES:
        after = each_jail.result(SEES_NOTHING, CallTest(function="f", args=[3], expected=9))
        assert after.verdict is Verdict.PASS, after


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_verdicts_are_right_as_another_user_too(level: int) -> None:
    """One program of each family; corpus_table.py runs all of them."""
    if not can_become_other():
        pytest.skip("needs root, setpriv, a Python 3.11 and an environment that all can read")
    with other_user() as command:
        done = subprocess.run(
            [*command, str(level), "few"],
            cwd="/", capture_output=True, text=True, timeout=250, check=False,
        )  # fmt: skip
    if "this machine has no level" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert [result for result in results if not result[3]] == []
    assert len(results) == len({case.family for case in (*CASES, *HONEST)})
